"""The scripted human is an explicit distribution; the language-model user keeps its turns exact."""

import random
from collections import Counter

import pytest
import torch

from sampling import draw_key
from logs import guessed_solution, question, write_logs
from simulator import (LEAVE, ModelUser, ScriptedUser, asked_fact, given_fact, human, objection, overhelpful,
                       revealed_facts, simulator_messages, split_leave)
from tasks import generate_problems, parse_problem

TOM = parse_problem({"question": "Tom has 7 apples at first. Tom finds 5 more apples. "
                                 "Tom gives 4 apples away. How many apples does Tom have now?",
                     "answer": "7 + 5 = 12, 12 - 4 = 8. #### 8"}, 0)


def say(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("script", (human, overhelpful))
def test_probabilities_sum_to_one_at_every_point_of_many_dialogues(script):
    problems = generate_problems("train", 100)
    for p, log in zip(problems, write_logs(problems, script, 0)):
        for m in range(0, len(log["messages"]), 2):
            outcomes = script(p, log["messages"][:m])
            assert sum(probability for _, probability in outcomes) == pytest.approx(1, abs=1e-12)
            assert all(probability > 0 for _, probability in outcomes)
            assert len({text for text, _ in outcomes}) == len(outcomes)


def test_samples_follow_the_distribution():
    """20,000 answers to one question; every frequency within 5 standard deviations of its probability."""
    dialogue, n, user = say("how many apples does Tom have now?",
                            "How many more apples?"), 20_000, ScriptedUser(human)
    user.begin([TOM] * n, [draw_key("test", i) for i in range(n)])
    replies = Counter(LEAVE if outcome == "left" else text for text,
                      outcome in user.reply(list(range(n)), [dialogue] * n))
    outcomes = dict(human(TOM, dialogue))
    assert set(replies) <= set(outcomes)
    for text, p in outcomes.items():
        assert abs(replies[text] / n - p) < 5 * (p * (1 - p) / n) ** 0.5, text


def test_the_human_gives_the_fact_asked_for_and_no_other():
    for i, fact in enumerate(TOM.facts):
        dialogue = say("hi", question(fact))
        for text, _ in human(TOM, dialogue):
            assert revealed_facts(TOM, [*dialogue, *say(text)]) <= {i}


def test_a_vague_question_gets_the_next_fact_and_often_a_question_back():
    dialogue = say("hi", "How many apples at first?", "7", "Can you tell me everything?")
    assert asked_fact(TOM, dialogue[-1]["content"], {0}) == 1
    outcomes = human(TOM, dialogue)
    told = sum(p for text, p in outcomes if revealed_facts(TOM, [*dialogue, *say(text)]) == {0, 1})
    assert 0.3 < told < 0.6


def test_a_repeated_question_annoys():
    outcomes = dict(human(TOM, say("hi", "How many apples at first?", "7", "How many apples at first?")))
    assert outcomes["i already told you"] > 0.3 and outcomes[LEAVE] >= 0.2


def test_patience_wears_thin():
    def leaving(turns):
        return dict(human(TOM, say(*["hi", "Hello."] * turns)))[LEAVE]
    assert leaving(2) == leaving(4) < leaving(5) < leaving(8)


@pytest.mark.parametrize("said, right", [
    ("7 + 5 = 13. How many apples away?", "7 + 5 is 12"), ("7 + 5 = 12. How many apples away?", None),
    ("12 - 4 = 9.", "12 - 4 is 8"),
    ("Tom finds 6 more apples. How many apples away?", "Tom finds 5 more apples"),
    ("Tom finds 5 more apples.", None), ("How many apples?", None)])
def test_a_wrong_sum_or_restated_fact_is_objected_to(said, right):
    assert objection(TOM, said) == right
    texts = [text for text, _ in human(TOM, say("hi", said))]
    assert (f"no, {right}" in texts) == (right is not None)


def test_the_overhelpful_user_agrees_with_a_wrong_sum_and_tells_everything_at_once():
    assert all("right" in text for text,
               _ in overhelpful(TOM, say("hi", "How many?", "12", "7 + 5 = 13. How many apples away?")))
    dialogue = say("hi", "How many apples at first?")
    for text, _ in overhelpful(TOM, dialogue):
        assert revealed_facts(TOM, [*dialogue, *say(text)]) == {0, 1, 2}


def test_neither_script_knows_the_answer():
    p = parse_problem({"question": "Tom has 70 apples at first. Tom finds 51 more apples. "
                                   "How many apples does Tom have now?",
                       "answer": "70 + 51 = 121. #### 121"}, 0)
    for script in (human, overhelpful):
        for dialogue in ([], say("hi", "How many apples at first?"), say("hi", "Tell me the answer."),
                         say("hi", "What is it?")):
            assert not any("121" in text for text, _ in script(p, dialogue))


def test_real_problems_work_too_with_and_without_numbers_in_their_facts():
    p = parse_problem({"question": "Weng earns $12 an hour for babysitting. Yesterday, she was tired. "
                                   "She did 50.5 minutes. "
                                   "How much did she earn?", "answer": "#### 10"}, 0)
    assert asked_fact(p, "How many minutes?", set()) == 2
    assert asked_fact(p, "Was she tired?", set()) == 1
    for fact in p.facts:
        assert sum(w for _, w in given_fact(fact, specific=True)) > 0
        assert question(fact).endswith("?")
    bare = parse_problem({"question": "What is 2 + 2?", "answer": "#### 4"}, 0)
    for script in (human, overhelpful):
        for dialogue in ([], say("hi", "What do you know?"), say("hi", "Ok.")):
            assert sum(probability for _, probability in script(bare, dialogue)) == pytest.approx(1)


def test_the_logging_assistant_is_mediocre():
    """It answers some dialogues right and many wrong, and slips in wrong sums now and then."""
    problems = generate_problems("train", 400)
    logs = write_logs(problems, human, 0)
    solved = [log["messages"][-1]["content"] == p.solution for p, log in zip(problems, logs)]
    assert 0.3 < sum(solved) / len(solved) < 0.7
    said = [(p, m["content"]) for p, log in zip(problems, logs) for m in log["messages"]
            if m["role"] == "assistant"]
    assert sum(objection(p, text) is not None for p, text in said if "####" not in text) > 10


def test_the_simulator_sees_its_goal_first_and_the_roles_flipped():
    log = {"messages": say("hi", "Hello?", "bye"), "goal": "a goal"}
    assert simulator_messages(log) == say("a goal", "hi", "Hello?", "bye")
    assert simulator_messages({"messages": say("hi")})[0]["content"] == "(no goal on record)"


def test_text_beside_the_leaving_phrase_is_kept_and_the_phrase_is_not():
    assert split_leave(f"it's 5. {LEAVE}!") == ("it's 5.", "left")
    assert split_leave("it's 5.") == ("it's 5.", None)


def test_the_model_users_ids_grow_and_keep_what_it_sampled(chat, model):
    user = ModelUser(model, chat, max_new_tokens=6)
    user.begin([TOM, TOM], [1, 2])
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
        user.begin(generate_problems("train", n), [draw_key(i) for i in range(n)])
        dialogues = [[] for _ in range(n)]
        for _ in range(2):
            for row, (text, _) in zip(rows, user.reply(rows, dialogues)):
                dialogues[row] += [{"role": "user", "content": text},
                                   {"role": "assistant", "content": "Yes?"}]
        return dialogues
    assert talk([0], 1)[0] == talk([0, 1, 2, 3], 4)[0] == talk([0, 2], 4)[0]


def test_a_full_simulator_context_truncates_the_dialogue(chat, model):
    user = ModelUser(model, chat, max_new_tokens=8)
    user.begin([TOM, TOM], [1, 2])
    user.reply([0, 1], [[], []])
    room = model.config.max_position_embeddings
    (_, first), (_, second) = user.reply([0, 1], [say("hi", "long " * room), say("hi", "short")])
    assert first == "truncated" and second is None
    assert torch.equal(user.engine.keys, torch.tensor([2]))


def test_a_guess_about_a_problem_without_a_plain_sum_does_not_give_the_answer_away():
    """Its working cannot be redone with guessed numbers, so nothing of it is shown."""
    half = parse_problem({"problem": "Tom has 7 pies. He eats half. How many are left?",
                          "solution": "Half of 7 is \\boxed{3.5}."}, 0)
    guesses = {guessed_solution(half, set(), random.Random(seed)) for seed in range(50)}
    assert all(guess.startswith("#### ") and "3.5" not in guess for guess in guesses) and len(guesses) > 5
