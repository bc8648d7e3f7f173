"""Users: a script is an explicit distribution; the language-model user keeps its turns exact."""

from collections import Counter

import torch
from conftest import say

from sampling import draw_key
from simulator import ModelUser, ScriptedUser, simulator_messages, split_leave
from task_math import TASK, parse_row
from tasks import LEAVE, generate_problems

TOM = parse_row({"question": "Tom has 7 apples at first. Tom finds 5 more apples. "
                             "Tom gives 4 apples away. How many apples does Tom have now?",
                 "answer": "7 + 5 = 12, 12 - 4 = 8. #### 8"}, 0, TASK.equal)


def test_samples_follow_the_distribution():
    """20,000 answers to one question; every frequency within 5 standard deviations of its probability."""
    dialogue = say("how many apples does Tom have now?", "How many more apples?")
    n, user = 20_000, ScriptedUser(TASK.human)
    user.begin([TOM.goal] * n, [draw_key("test", i) for i in range(n)])
    replies = Counter(LEAVE if outcome == "left" else text
                      for text, outcome in user.reply(list(range(n)), [dialogue] * n))
    outcomes = dict(TASK.human(TOM.goal, dialogue))
    assert set(replies) <= set(outcomes)
    for text, p in outcomes.items():
        assert abs(replies[text] / n - p) < 5 * (p * (1 - p) / n) ** 0.5, text


def test_the_simulator_sees_its_goal_first_and_the_roles_flipped():
    log = {"messages": say("hi", "Hello?", "bye"), "goal": "a goal"}
    assert simulator_messages(log) == say("a goal", "hi", "Hello?", "bye")
    assert simulator_messages({"messages": say("hi")})[0]["content"] == "(no goal on record)"


def test_text_beside_the_leaving_phrase_is_kept_and_the_phrase_is_not():
    assert split_leave(f"it's 5. {LEAVE}!") == ("it's 5.", "left")
    assert split_leave("it's 5.") == ("it's 5.", None)


def test_the_model_users_ids_grow_and_keep_what_it_sampled(chat, model):
    user = ModelUser(model, chat, max_new_tokens=6)
    user.begin([TOM.goal, TOM.goal], [1, 2])
    dialogues, before = [[], []], None
    for turn in range(3):
        for dialogue, (text, _) in zip(dialogues, user.reply([0, 1], dialogues)):
            dialogue += [{"role": "user", "content": text},
                         {"role": "assistant", "content": f"Question {turn}?"}]
        if before:
            assert all(now[:len(old)] == old for now, old in zip(user.engine.tokens, before))
        before = [list(ids) for ids in user.engine.tokens]


def test_dialogues_of_a_batch_share_nothing(chat, model):
    """A dialogue is the same alone and among others, and when others have left."""
    def talk(rows, n):
        user = ModelUser(model, chat, max_new_tokens=8)
        user.begin([p.goal for p in generate_problems(TASK, "train", n)], [draw_key(i) for i in range(n)])
        dialogues = [[] for _ in range(n)]
        for _ in range(2):
            for row, (text, _) in zip(rows, user.reply(rows, dialogues)):
                dialogues[row] += [{"role": "user", "content": text},
                                   {"role": "assistant", "content": "Yes?"}]
        return dialogues
    assert talk([0], 1)[0] == talk([0, 1, 2, 3], 4)[0] == talk([0, 2], 4)[0]


def test_a_full_simulator_context_truncates_the_dialogue(chat, model):
    user = ModelUser(model, chat, max_new_tokens=8)
    user.begin([TOM.goal, TOM.goal], [1, 2])
    user.reply([0, 1], [[], []])
    room = model.config.max_position_embeddings
    (_, first), (_, second) = user.reply([0, 1], [say("hi", "long " * room), say("hi", "short")])
    assert first == "truncated" and second is None
    assert torch.equal(user.engine.draw_keys, torch.tensor([2]))
