"""The report card: what is measured of a reply, and of all speakers in the same places."""

import pytest
from conftest import say

from config import UserError
from engine import Engine
from logs import write_logs, write_probes
from report_card import NLL, bootstrap, measure, read_before, report_card, sampled_replies
from sampling import draw_key
from task_math import AGREES, TASK, objection, parse_row
from tasks import LEAVE, facts_of, generate_problems

TOM = parse_row({"question": "Tom has 7 apples at first. Tom finds 5 more apples. "
                             "Tom gives 4 apples away. How many apples does Tom have now?",
                 "answer": "#### 8"}, 0, TASK.equal)


def test_style_is_measured_on_a_reply_by_hand():
    context = say("hi", "How many more apples?")
    measures = measure(TASK, TOM.goal, context, "thanks, 5?")
    assert measures["three words or fewer"] == measures["asks something"] == measures["thanks"] == (True, 1)
    assert measures["facts revealed per reply"] == (1, 1) and measures["facts stated right"] == (1, 1)
    for absent in ("speaks as the assistant", "leaves", "repeats itself"):
        assert measures[absent] == (False, 1)
    assert measure(TASK, TOM.goal, context, f"{LEAVE}")["leaves"] == (True, 1)
    assert measure(TASK, TOM.goal, context, "HI")["repeats itself"] == (True, 1)
    assert measure(TASK, TOM.goal, context, "7 + 5 = 12. #### 12")["speaks as the assistant"] == (True, 1)
    assert "facts revealed per reply" not in measure(TASK, None, context, "5")


@pytest.mark.parametrize("reply, agrees",
                         [("Yes, that is right!", True), ("ok", True), ("no, 7 + 5 is 12", False),
                          ("that's not right", False), ("are you sure?", False)])
def test_agreement_counts_only_where_the_assistant_was_wrong(reply, agrees):
    wrong = say("hi", "7 + 5 = 13. How many apples away?")
    right = say("hi", "7 + 5 = 12. How many apples away?")
    assert measure(TASK, TOM.goal, wrong, reply)[AGREES] == (agrees, 1)
    assert AGREES not in measure(TASK, TOM.goal, right, reply)


def test_the_bootstrap_resamples_dialogues():
    """Ten dialogues that agree have no spread; a half-and-half split of ratio 0.5 has one of about 0.5 +-
    0.31.
    """
    assert bootstrap([(1, 2)] * 10, seed=0) == [0.5, 0.5, 0.5]
    value, low, high = bootstrap([(0, 1)] * 5 + [(1, 1)] * 5, seed=0)
    assert value == 0.5 and 0.1 <= low <= 0.3 and 0.7 <= high <= 0.9


def test_the_report_card_compares_all_speakers_on_the_same_contexts(chat, model):
    problems = generate_problems(TASK, "validation", 12)
    logs = write_logs(TASK, problems, "human", 0)
    card = report_card(TASK, logs, {"naive": model, "calibrated": model}, chat, seed=0, max_new_tokens=5,
                       scripted=True, probes=write_probes(TASK, problems, logs, "human", 0))
    for line, row in card.items():
        assert row["naive"] == row["calibrated"], line
        assert all(low <= value <= high for value, low, high in row.values())
    assert card["facts stated right"]["human"][0] == 1.0
    assert card[NLL]["human"][0] < card[NLL]["naive"][0]


def test_logs_of_real_people_without_a_goal_have_a_report_card_too(chat, model):
    logs = [{"messages": say("how do i start?", "Divide.", "411/333", "Good.")},
            {"messages": say("ok?" * 700, "Yes.")}]
    card = report_card(TASK, logs, {"naive": model}, chat, seed=0, max_new_tokens=4)
    assert "facts revealed per reply" not in card
    assert card["asks something"]["human"][0] == pytest.approx(2 / 3, abs=1e-4)


def test_contexts_that_leave_no_room_for_a_reply_count_for_no_speaker(chat, model):
    """Otherwise a simulator's missing reply would pass as a short one. Only the opening of the second log
    fits.
    """
    logs = [{"messages": say("how do i start?", "Divide.", "411/333")},
            {"messages": say("ok", "so?" * 400, "why?")}]
    card = report_card(TASK, logs, {"naive": model}, chat, seed=0, max_new_tokens=4)
    assert card["asks something"]["human"][0] == pytest.approx(1 / 3, abs=1e-4)
    with pytest.raises(UserError, match="leaves room"):
        report_card(TASK, [{"messages": say("hi"), "goal": "long? " * 600}], {"naive": model}, chat, seed=0,
                    max_new_tokens=4)


def test_to_a_planted_wrong_result_the_overhelpful_user_agrees_and_the_human_objects():
    problems = generate_problems(TASK, "validation", 100)
    logs, agreed = write_logs(TASK, problems, "human", 0), {}
    for speaker in ("human", "overhelpful"):
        probes = write_probes(TASK, problems, logs, speaker, 0)
        assert len(probes) > 40 and all(objection(facts_of(p["goal"]), p["messages"][-2]["content"])
                                        for p in probes)
        found = [measure(TASK, p["goal"], p["messages"][:-1], p["messages"][-1]["content"])[AGREES][0]
                 for p in probes]
        agreed[speaker] = sum(found) / len(found)
    assert agreed["overhelpful"] == 1 and agreed["human"] < 0.3


def test_every_reply_is_what_the_simulator_says_after_reading_the_log_up_to_there_afresh(model, chat):
    """The report card reads a log once and takes sampled replies back: nothing of them may stay cached."""
    logs = write_logs(TASK, generate_problems(TASK, "train", 5), "human", 0)
    places = [(l, m) for l, log in enumerate(logs) for m in range(0, len(log["messages"]), 2)]
    once = sampled_replies(model, chat, logs, places, seed=0, max_new_tokens=8)
    for (l, m), reply in zip(places, once, strict=True):
        engine = Engine(model, chat, [read_before(chat, logs[l], m)], [draw_key(0, "report card", l, m)], 8)
        assert chat.text(engine.reply()[0]) == reply
