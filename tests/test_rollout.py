"""Whole dialogues: who speaks, when they end, and what is recorded."""

from itertools import groupby

import pytest
import torch

from extras.records import interval
from extras.speakers import find_simulator
from logprobs import token_logprobs
from rollout import pad, rollout
from simulator import ModelUser, ScriptedUser
from task_math import TASK
from tasks import LEAVE, generate_problems

PROBLEMS = generate_problems(TASK, "train", 6)


def keys(n=6, seed=0):
    return [(seed, "test", 0, i, 0) for i in range(n)]


def human():
    return ScriptedUser(TASK.human)


class Answers:
    """A user whose messages are given, the same in every dialogue."""

    def __init__(self, *replies):
        self.replies = replies

    def begin(self, goals, draw_keys):
        self.turn = 0

    def reply(self, rows, dialogues):
        self.turn += 1
        return [self.replies[(self.turn - 1) % len(self.replies)]] * len(rows)


def test_trajectories_hold_together(chat, model):
    """Masked tokens decode to the assistant's messages, the user's tokens are 0 in the mask, and
    log-probabilities recorded while sampling equal those that the training forward computes.
    """
    trajectories = rollout(model, chat, human(), TASK, PROBLEMS, keys(), horizon=3, max_new_tokens=7)
    tokens, mask, logprobs = pad(trajectories)
    assert torch.allclose(token_logprobs(model, tokens, mask).float(), logprobs, atol=1e-5)
    for t in trajectories:
        assert len(t.tokens) == len(t.action_mask) == len(t.logprobs)
        assert t.turns == sum(m["role"] == "assistant" for m in t.messages)
        assert sum(t.action_mask) <= 7 * t.turns
        ids = chat.open(t.messages[0]["content"])
        assert t.tokens[:len(ids)] == ids and not any(t.action_mask[:len(ids)])
        runs = [[token for token, on in run if on] for action, run in
                ((action, list(run)) for action,
                 run in groupby(zip(t.tokens, t.action_mask), lambda x: x[1])) if action]
        assert [chat.text(run) for run in runs] == [m["content"] for m in t.messages
                                                    if m["role"] == "assistant"]


def test_the_same_keys_give_the_same_dialogues_and_other_keys_others(chat, model):
    def texts(seed):
        return [t.messages for t in rollout(model, chat, human(), TASK, PROBLEMS, keys(seed=seed), horizon=2,
                                            max_new_tokens=6)]
    assert texts(0) == texts(0) != texts(1)


def test_a_dialogue_does_not_depend_on_who_shares_its_batch(chat, model):
    user = ModelUser(model, chat, max_new_tokens=6)
    together = rollout(model, chat, user, TASK, PROBLEMS, keys(), horizon=3, max_new_tokens=6)
    for i, t in enumerate(together):
        alone, = rollout(model, chat, user, TASK, PROBLEMS[i:i + 1], keys()[i:i + 1], horizon=3,
                         max_new_tokens=6)
        assert alone.tokens == t.tokens and alone.messages == t.messages and alone.ended == t.ended


@pytest.fixture
def says(chat, model):
    """Make the model say a text, whatever it reads: its logits are overwritten, token by token, reply by
    reply.
    """
    def make(text):
        script, said = [*chat.encode(text), chat.end], [0]

        def scores(hidden):
            scores = torch.full((*hidden.shape[:-1], chat.vocab_size), -1000.0, dtype=torch.float64)
            scores[..., script[said[0] % len(script)]] = 0.0
            said[0] += 1
            return scores

        model.scores = scores
        return model
    return make


def test_an_unmarked_dialogue_ends_at_the_horizon_without_reward(chat, says):
    for t in rollout(says("It is so."), chat, Answers(("5", None)), TASK, PROBLEMS, keys(), horizon=2,
                     max_new_tokens=9):
        assert (t.ended, t.reward, t.turns, t.cut) == ("horizon", 0.0, 2, 0)
        assert t.messages[-1] == {"role": "assistant", "content": "It is so."}


def test_a_user_who_leaves_ends_the_dialogue_and_keeps_their_last_words(chat, says):
    user = Answers(("hi", None), ("it's 5", "left"))
    for t in rollout(says("Hm?"), chat, user, TASK, PROBLEMS, keys(), horizon=4, max_new_tokens=4):
        assert (t.ended, t.reward, t.turns) == ("left", 0.0, 1)
        assert t.messages[-1] == {"role": "user", "content": "it's 5"}


def test_a_full_context_ends_the_dialogue_as_truncated_not_in_an_exception(chat, says):
    user = Answers(("hi", None), ("long " * 600, None))
    for t in rollout(says("Hm?"), chat, user, TASK, PROBLEMS, keys(), horizon=4, max_new_tokens=4):
        assert (t.ended, t.reward, t.turns) == ("truncated", 0.0, 1)


def test_a_user_who_never_opens_leaves_an_empty_dialogue(chat, model):
    for t in rollout(model, chat, Answers(("", "left")), TASK, PROBLEMS, keys(), horizon=4, max_new_tokens=4):
        assert (t.ended, t.reward, t.turns, sum(t.action_mask)) == ("left", 0.0, 0, 0)


def test_a_marked_answer_ends_the_dialogue_and_is_graded(chat, says):
    for problem, expected in ((PROBLEMS[0], 1.0),
                              (PROBLEMS[2], float(PROBLEMS[2].answer == PROBLEMS[0].answer))):
        t, = rollout(says(PROBLEMS[0].solution), chat, Answers(("hi", None)), TASK, [problem], keys(1),
                     horizon=4, max_new_tokens=40)
        assert (t.ended, t.reward, t.turns, t.cut) == ("answer", expected, 1, 0)
        assert t.messages[-1]["content"] == PROBLEMS[0].solution


def test_the_simulator_of_a_run_is_found_beside_its_policies(tmp_path):
    (tmp_path / "out" / "simulator_calibrated").mkdir(parents=True)
    for policy in (tmp_path / "out" / "policy", tmp_path / "out" / "naive" / "policy"):
        assert find_simulator(str(policy), "calibrated") == str(tmp_path / "out" / "simulator_calibrated")


def test_logged_contexts_are_no_actions(chat, model):
    context = [{"role": "user", "content": "how many?"},
               {"role": "assistant", "content": "How many at first?"}, {"role": "user", "content": "7"}]
    t, = rollout(model, chat, human(), TASK, PROBLEMS[:1], keys(1), horizon=1, max_new_tokens=5,
                 contexts=[context])
    ids = chat.render(context)[0]
    assert t.tokens[:len(ids)] == ids and sum(t.action_mask[:len(ids)]) == 0 < sum(t.action_mask)
    assert t.messages[:3] == context and len(t.messages) == 4


def test_a_cut_reply_is_marked_and_its_forced_end_of_turn_is_no_action(chat, says):
    """Three tokens of "How many apples at first?" fit; the end-of-turn that follows them was not sampled."""
    t, = rollout(says("How many apples at first?"), chat, Answers(("5", None)), TASK, PROBLEMS[:1], keys(1),
                 horizon=2, max_new_tokens=3)
    start = len(chat.open("5"))
    assert t.cut == 2 and t.messages[1]["content"] == "How many apples"
    assert t.action_mask[start:start + 4] == [1, 1, 1, 0] and t.tokens[start + 3] == chat.end


def test_the_leaving_phrase_ends_a_scripted_dialogue(chat, says):
    leaver = ScriptedUser(lambda goal, dialogue: [(LEAVE, 1.0)] if dialogue else [("hi", 1.0)])
    t, = rollout(says("Hm?"), chat, leaver, TASK, PROBLEMS[:1], keys(1), horizon=3, max_new_tokens=4)
    assert t.ended == "left" and LEAVE not in str(t.messages)


def test_a_share_has_a_wilson_interval_by_hand():
    """8 of 10: centre 0.8 + 1.96^2 / 20 = 0.992, spread 1.96 sqrt(0.016 + 0.009604) = 0.3136, both over
    1.38416.
    """
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx([0.4902, 0.9433], abs=1e-3)
    assert interval([0.0] * 10)[0] == 0 and interval([1.0] * 10)[1] == 1


def test_the_mean_of_other_rewards_has_an_interval_of_1_96_standard_errors():
    """0.2, 0.4, 0.6: mean 0.4, standard deviation 0.2 (ddof 1), standard error 0.2 / sqrt(3)."""
    spread = 1.96 * 0.2 / 3 ** 0.5
    assert interval([0.2, 0.4, 0.6]) == pytest.approx([0.4 - spread, 0.4 + spread])
    assert interval([0.9, 1.0, 0.5])[1] == 1 and interval([0.5]) == [0.5, 0.5]
