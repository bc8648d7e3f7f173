"""Supervised fine-tuning and the report card."""

import copy
import json
import random

import pytest
import torch

from align_sim import calibrate
from engine import Engine
from logprobs import token_logprobs
from logs import read_logs, split_logs, write_logs, write_probes
from report_card import (AGREES, NLL, bootstrap, model_nll, opening, report_card,
                         sampled_replies, script_nll, stated_facts, style_measures)
from sampling import draw_key
from sft import examples_nll, mean_nll, pack, sft
from simulator import LEAVE, human, objection, overhelpful, simulator_messages
from tasks import generate_problems, parse_problem

TOM = parse_problem({"question": "Tom has 7 apples at first. Tom finds 5 more apples. "
                                 "Tom gives 4 apples away. How many apples does Tom have now?",
                     "answer": "#### 8"}, 0)


def say(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_calibration_trains_the_users_tokens_and_exactly_no_others(chat, model):
    """The mask of a logged dialogue, user text and its end-of-turn 1, and the gradient of the loss by
    log-probability.
    """
    ids, mask = chat.render(simulator_messages({"messages": say("hi", "How many?", "5"), "goal": "a goal"}))
    trained = [chat.decode([token]) for token, m in zip(ids, mask) if m]
    assert trained == ["hi", "<|end|>", "5", "<|end|>"]
    logprobs = token_logprobs(model, torch.tensor([ids]), torch.tensor([mask]))
    logprobs.retain_grad()
    (-logprobs[torch.tensor([mask]).bool()].sum()).backward()
    assert (logprobs.grad[0][~torch.tensor(mask).bool()] == 0).all() and (logprobs.grad[0] != 0).sum() == 4


def test_fine_tuning_lowers_the_loss_and_the_same_seed_gives_the_same_weights(chat, model):
    examples = [chat.render(log["messages"]) for log in write_logs(generate_problems("train", 20), human, 0)]
    weights = []
    for _ in range(2):
        again = copy.deepcopy(model)
        losses = sft(again, examples, steps=12, batch=8, lr=1e-2, seed=0)
        assert losses[-1] < 0.8 * losses[0]
        weights.append(again.lm_head.weight)
    assert torch.equal(*weights)


def test_the_split_into_micro_batches_does_not_change_the_loss(chat, model):
    examples = [chat.render(log["messages"]) for log in write_logs(generate_problems("train", 20), human, 0)]
    losses = [sft(copy.deepcopy(model), examples, steps=3, batch=8, lr=1e-3, seed=0, token_budget=size)
              for size in (1, 200, 4096)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] == pytest.approx(losses[2], rel=1e-6)


def test_calibration_lowers_the_nll_of_human_turns_towards_the_scripts_own(chat, model):
    problems = generate_problems("train", 60)
    logs = write_logs(problems, human, 0)
    before = model_nll(model, chat, logs)
    calibrate(model, chat, logs, steps=25, batch=16, lr=1e-2, seed=0)
    after, floor = model_nll(model, chat, logs), [script_nll(human, p, log, chat) for p,
                                                 log in zip(problems, logs)]
    assert [n for _, n in after] == [n for _, n in before] == [n for _, n in floor]
    assert sum(v for v, _ in floor) < sum(v for v, _ in after) < 0.7 * sum(v for v, _ in before)


def test_style_is_measured_on_a_reply_by_hand():
    context = say("hi", "How many more apples?")
    measures = style_measures(TOM, context, "thanks, 5?")
    assert measures["three words or fewer"] == measures["asks something"] == measures["thanks"] == (True, 1)
    assert measures["facts revealed a reply"] == (1, 1) and measures["facts stated right"] == (1, 1)
    for absent in ("speaks as the assistant", "leaves", "repeats itself"):
        assert measures[absent] == (False, 1)
    assert style_measures(TOM, context, f"{LEAVE}")["leaves"] == (True, 1)
    assert style_measures(TOM, context, "HI")["repeats itself"] == (True, 1)
    assert style_measures(TOM, context, "7 + 5 = 12. #### 12")["speaks as the assistant"] == (True, 1)
    assert "facts revealed a reply" not in style_measures(None, context, "5")


@pytest.mark.parametrize("reply, agrees",
                         [("Yes, that is right!", True), ("ok", True), ("no, 7 + 5 is 12", False),
                                           ("that's not right", False), ("are you sure?", False)])
def test_agreement_counts_only_where_the_assistant_was_wrong(reply, agrees):
    wrong = say("hi", "7 + 5 = 13. How many apples away?")
    right = say("hi", "7 + 5 = 12. How many apples away?")
    assert style_measures(TOM, wrong, reply)[AGREES] == (agrees, 1)
    assert AGREES not in style_measures(TOM, right, reply)


@pytest.mark.parametrize("text, counts", [("5", (1, 1)), ("4", (0, 1)), ("4, no wait, 5 more apples", (1, 1)),
                                          ("what do you mean?", (0, 0)),
                                          ("Tom finds 5 more apples. Tom has 8 apples at first.", (1, 2))])
def test_facts_stated_right_by_hand(text, counts):
    assert stated_facts(TOM, "How many more apples?", set(), text) == counts


def test_the_bootstrap_resamples_dialogues():
    """Ten dialogues that agree have no spread; a half-and-half split of ratio 0.5 has one of about 0.5 +-
    0.31.
    """
    assert bootstrap([(1, 2)] * 10, seed=0) == [0.5, 0.5, 0.5]
    value, low, high = bootstrap([(0, 1)] * 5 + [(1, 1)] * 5, seed=0)
    assert value == 0.5 and 0.1 <= low <= 0.3 and 0.7 <= high <= 0.9


def test_the_report_card_compares_all_speakers_on_the_same_contexts(chat, model):
    problems = generate_problems("validation", 12)
    logs = write_logs(problems, human, 0)
    card = report_card(logs, {"naive": model, "calibrated": model}, chat, seed=0, max_new_tokens=5,
                       script=human, probes=write_probes(problems, logs, human, 0))
    for measure, row in card.items():
        assert row["naive"] == row["calibrated"], measure
        assert all(low <= value <= high for value, low, high in row.values())
    assert card["facts stated right"]["human"][0] == 1.0
    assert card[NLL]["human"][0] < card[NLL]["naive"][0]


def test_logs_of_real_people_without_a_goal_have_a_report_card_too(chat, model):
    logs = [{"messages": say("how do i start?", "Divide.", "411/333", "Good.")},
            {"messages": say("ok?" * 700, "Yes.")}]
    card = report_card(logs, {"naive": model}, chat, seed=0, max_new_tokens=4)
    assert "facts revealed a reply" not in card
    assert card["asks something"]["human"][0] == pytest.approx(2 / 3, abs=1e-4)


def test_contexts_that_leave_no_room_for_a_reply_count_for_no_speaker(chat, model):
    """Otherwise a simulator's missing reply would pass as a short one. Only the opening of the second log
    fits.
    """
    logs = [{"messages": say("how do i start?", "Divide.", "411/333")},
            {"messages": say("ok", "so?" * 400, "why?")}]
    card = report_card(logs, {"naive": model}, chat, seed=0, max_new_tokens=4)
    assert card["asks something"]["human"][0] == pytest.approx(1 / 3, abs=1e-4)
    with pytest.raises(ValueError, match="leaves room"):
        report_card([{"messages": say("hi"), "goal": "long? " * 600}], {"naive": model}, chat, seed=0,
                    max_new_tokens=4)


def test_to_a_planted_wrong_result_the_overhelpful_user_agrees_and_the_human_objects():
    problems = generate_problems("validation", 100)
    logs, agreed = write_logs(problems, human, 0), {}
    for script in (human, overhelpful):
        probes = write_probes(problems, logs, script, 0)
        goals = {p.goal: p for p in problems}
        assert len(probes) > 40 and all(objection(goals[p["goal"]], p["messages"][-2]["content"])
                                        for p in probes)
        found = [style_measures(goals[p["goal"]], p["messages"][:-1],
                                p["messages"][-1]["content"])[AGREES][0] for p in probes]
        agreed[script] = sum(found) / len(found)
    assert agreed[overhelpful] == 1 and agreed[human] < 0.3


def test_logs_are_split_by_whole_dialogues_and_one_is_too_few():
    logs = [{"messages": say(str(i))} for i in range(10)]
    train, held_out = split_logs(logs, seed=0)
    assert len(train) == 8 and len(held_out) == 2 and all(log in train or log in held_out for log in logs)
    with pytest.raises(ValueError, match="one human dialogue is not enough"):
        split_logs(logs[:1], seed=0)


def test_dialogues_without_a_token_to_learn_are_refused(chat, model):
    with pytest.raises(ValueError, match="no dialogue has a token to learn"):
        sft(model, [([1, 2], [0, 0])], steps=1, batch=1, lr=1e-3, seed=0)


GOOD = {"messages": say("hi", "Hello?")}


@pytest.mark.parametrize("record, message", [
    ([], "expected an object"), ({}, "expected an object"), ({"messages": []}, "expected an object"),
    ({"messages": "hi"}, "expected an object"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "must be the user's"),
    ({"messages": [{"role": "user", "content": "x"}] * 2}, "message 2 must be the assistant's"),
    ({"messages": [{"role": "user", "content": " "}]}, "not empty"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "not empty"),
    ({"messages": ["x"]}, "must be the user's"), ({**GOOD, "goal": 3}, "'goal' must be a text")])
def test_a_broken_log_is_named_with_file_and_line(tmp_path, record, message):
    path = tmp_path / "logs.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_logs(str(path))
    assert f"{path}, line 2" in str(error.value)


def test_calibration_on_few_dialogues_stops_before_it_learns_them_by_heart(model, chat):
    """Twelve dialogues, a high learning rate: the loss on two set aside rises again, the minimum is kept."""
    logs = write_logs(generate_problems("train", 12), human, 0)
    examples = [chat.render(simulator_messages(log)) for log in logs]
    by_heart = copy.deepcopy(model)
    losses = calibrate(model, chat, logs, steps=200, batch=10, lr=1e-2, seed=0, stop_early=True)
    calibrate(by_heart, chat, logs[2:], steps=200, batch=10, lr=1e-2, seed=0)
    assert len(losses) < 200
    assert mean_nll(model, examples[:2]) < mean_nll(by_heart, examples[:2]) - 0.5


def test_every_reply_is_what_the_simulator_says_after_reading_the_log_up_to_there_afresh(model, chat):
    """The report card reads a log once and takes sampled replies back: nothing of them may stay cached."""
    logs = write_logs(generate_problems("train", 5), human, 0)
    places = [(l, m) for l, log in enumerate(logs) for m in range(0, len(log["messages"]), 2)]
    once = sampled_replies(model, chat, logs, places, seed=0, max_new_tokens=8)
    for (l, m), reply in zip(places, once, strict=True):
        engine = Engine(model, chat, [opening(chat, logs[l], m)], [draw_key(0, "report card", l, m)], 8)
        assert chat.text(engine.reply()[0]) == reply


def test_scoring_many_examples_together_gives_what_each_has_alone(model, chat):
    """Packed rows and any budget: no dialogue may see another, and each gets its own tokens back."""
    examples = [chat.render(simulator_messages(log))
                for log in write_logs(generate_problems("train", 6), human, 0)]
    alone = [-token_logprobs(model, torch.tensor([ids]), torch.tensor([mask])).sum().item()
             for ids, mask in examples]
    for token_budget in (1, 200, 4096):
        together = examples_nll(model, examples, token_budget)
        assert [nll for nll, _ in together] == pytest.approx(alone, rel=1e-9)
        assert [count for _, count in together] == [sum(mask) for _, mask in examples]


def test_packing_puts_every_example_into_one_row_and_keeps_to_the_budget():
    """The example of `pack`, and 200 random ones: no row longer than the longest of its micro-batch."""
    assert pack([2, 5, 3, 4, 1], 10) == [[[1], [3, 4]], [[2], [0]]]
    rng = random.Random(0)
    for _ in range(200):
        lengths, budget = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))], rng.randint(1, 300)
        batches = pack(lengths, budget)
        assert sorted(i for rows in batches for row in rows for i in row) == list(range(len(lengths)))
        for rows in batches:
            longest = max(lengths[i] for row in rows for i in row)
            assert all(sum(lengths[i] for i in row) <= longest for row in rows)
            assert len(rows) * longest <= max(budget, longest)
