"""The maths task: problems and reward, what the scripts say, what a reply is measured by."""

import random
from hashlib import sha256

import pytest
from conftest import say

from config import UserError
from extras import grader
from extras.grader import equal
from logs import write_logs
from task_math import (TASK, given_fact, guessed_solution, marked_answer, objection, overhelpful,
                       parse_row, question_about, scripted_human, stated_facts)
from tasks import (LEAVE, GradingError, asked_fact, facts_of, generate_problems, question_of, revealed_facts,
                   split_sentences)

TOM = parse_row({"question": "Tom has 7 apples at first. Tom finds 5 more apples. "
                             "Tom gives 4 apples away. How many apples does Tom have now?",
                 "answer": "7 + 5 = 12, 12 - 4 = 8. #### 8"}, 0, TASK.equal)
FACTS = facts_of(TOM.goal)
HOSTILE = ("9^{9^{9}}", "9**9**9", "99999999!", "1" * 3_000_000, "{" * 1_000_000, r"\boxed{" * 300_000,
           "#" * 999_999, r"\frac{" * 300_000, r"\frac{1", "\u2212" * 1000, "$" * 1_000_000, " " * 1_000_000)


def problem(answer="10"):
    return parse_row({"question": "Tom has 7 apples. How many?", "answer": f"7 + 3 = 10. #### {answer}"}, 0,
                     equal)


def boxed(answer):
    return parse_row({"problem": "Let $x = 1.$ What is $y$?", "solution": rf"So $\boxed{{{answer}}}.$"}, 0,
                     equal)


def rewarded(problem, reply):
    """The reward of a dialogue that ends with a reply, however the answer in it is written."""
    return TASK.reward(problem, say("hi", reply), equal)


def test_generated_answers_are_right():
    for p in generate_problems(TASK, "train", 500):
        first, more, away = (int(next(f for f in facts_of(p.goal) if word in f).split()[2])
                             for word in ("first", "more", "away"))
        assert int(p.answer) == first + more - away > 0
        assert rewarded(p, p.solution) == 1.0


def test_problems_of_three_facts_are_those_of_every_release():
    """The hash of 1000 problems as generated before two facts could be asked for."""
    text = "\n".join(p.goal + p.solution for p in generate_problems(TASK, "train", 1000))
    assert sha256(text.encode()).hexdigest() == (
        "ebb5e3d5d795b1b47621e6ade1e346755d9ea51cb54cb58e6937e901b0a29834")


def test_problems_of_two_facts_are_one_sum():
    for p in generate_problems(TASK, "train", 500, facts=2):
        facts = facts_of(p.goal)
        first, more = (int(next(f for f in facts if word in f).split()[2]) for word in ("first", "more"))
        assert len(facts) == 2
        assert p.solution == f"{first} + {more} = {first + more}. #### {first + more}"


def test_a_goal_does_not_tell_the_answer():
    row = {"question": "Tom has 7 apples. He gets 94 more. How many?", "answer": "#### 101"}
    p = parse_row(row, 0, equal)
    assert "101" not in p.goal


@pytest.mark.parametrize("reply", ("#### 10", "#### 10.", "#### $10", "####10",
                                   "so 7 + 3 = 10. #### 10 apples", "#### 10.00",
                                   "#### 9 no #### 10", r"\boxed{10}", "#### 10%", "#### 10\nThat is it."))
def test_a_right_answer_is_accepted_however_it_is_written(reply):
    assert rewarded(problem(), reply) == 1.0


@pytest.mark.parametrize("reply", ("10", "", "#### ", "#### 11", "#### 10 #### 11", "#### 10 or 11",
                                   "#### -10", "#### 1 0", "####",
                                   "#### ten", "#### 10" + "0" * 10_000, "#### __import__('os')", r"\boxed{",
                                   "#### 1e1"))
def test_anything_else_is_not(reply):
    assert rewarded(problem(), reply) == 0.0


def test_thousands_commas_and_unicode_minus_do_not_matter():
    assert rewarded(problem("2,950"), "#### 2950") == 1.0
    assert rewarded(problem("-3"), "#### \u22123") == 1.0


@pytest.mark.parametrize("gold, reply", [
    (r"\frac{1}{2}", r"so \boxed{\frac{2}{4}}"), (r"\frac{1}{2}", "#### 0.5"), (r"\frac{1}{2}", "#### 1/2"),
    (r"-\frac{1}{2}", "#### \u22121/2"), ("10", r"\boxed{\frac{20}{2}}"), ("10", "#### 20/2"),
    ("$2,950", r"\boxed{2{,}950}"), ("0.0000001", r"\boxed{\frac{1}{10000000}}"), ("x=5", "#### 5"),
    (r"\{1, 2\}", r"\boxed{2, 1}"), (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}")])
def test_an_answer_that_is_no_plain_number_is_graded_by_math_verify(gold, reply):
    assert rewarded(boxed(gold), reply) == 1.0
    assert rewarded(boxed(gold), r"\boxed{\frac{7}{3}}") == rewarded(boxed(gold), "#### 7") == 0.0


def test_a_letter_behind_a_right_number_is_no_unit():
    assert rewarded(boxed("2x"), "#### 2x") == rewarded(boxed("3 x"), "#### 3x") == 1.0
    assert rewarded(boxed("2x"), "#### 2") == rewarded(boxed("3 x"), "#### 3") == 0.0
    assert rewarded(boxed("10 apples"), "#### 10") == rewarded(boxed("10 cm"), "#### 10 centimetres") == 1.0


def test_plain_numbers_never_start_math_verify(monkeypatch):
    """Nor does a sum for a number: writing 7 + 3 is not working it out. 50 for 50% is right here too."""
    monkeypatch.setattr(grader, "same_by_algebra", None)
    assert rewarded(problem("50%"), "#### 50") == rewarded(problem("50"), "#### 50%") == 1.0
    assert rewarded(problem(), "#### 7 + 3") == rewarded(problem(), "#### x = 10") == 0.0


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:9])
@pytest.mark.parametrize("gold", ("10", r"\frac{1}{2}"))
def test_a_hostile_answer_is_wrong_within_a_bounded_time(gold, answer):
    """Megabytes are read once, and what never ends is never begun."""
    assert rewarded(boxed(gold), f"#### {answer}") == rewarded(boxed(gold), rf"\boxed{{{answer}}}") == 0.0
    assert split_sentences(f"A. {answer} B.")


def test_a_grader_that_comes_to_no_verdict_is_no_reward_of_0():
    with pytest.raises(GradingError):
        rewarded(boxed(r"\frac{1}{2}"), r"\boxed{\binom{99999999}{44444444}}")


def test_the_last_marker_counts():
    assert marked_answer("#### 1 then #### 2, \\boxed{3}") == "3"
    assert marked_answer("\\boxed{1}\n#### 2") == "2"
    assert marked_answer("no marker") is None


def test_a_box_ends_where_its_braces_close():
    assert marked_answer(r"\boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert marked_answer(r"\boxed{\left\{ 1, 2 \right.} or so}") == r"\left\{ 1, 2 \right."
    assert marked_answer("\\boxed{1 \\\\\n 2}") == "1 \\\\\n 2"
    assert marked_answer(r"\boxed{1} and \boxed{2\boxed{3}}") == "3"


def test_a_box_left_open_is_no_marker_and_hides_those_before_it():
    """A reply that the length limit cut has not answered yet, whatever it tried before."""
    assert marked_answer(r"\boxed{1} so \boxed{\frac{1}{2}") is None
    assert marked_answer(r"#### 1 \boxed{2") is None
    assert marked_answer(r"\boxed{2 #### 1") == "1"


def test_a_row_of_math_is_a_problem_the_human_can_talk_about():
    row = {"problem": "Let $x = 3.$ Let $y = \\frac{x}{6}.$ What is $y$?", "level": 2,
           "solution": r"We have $y = \frac{3}{6} = \boxed{\frac{1}{2}}.$", "answer": r"\frac{1}{2}"}
    p = parse_row(row, 0, equal)
    facts = facts_of(p.goal)
    assert facts == ("Let $x = 3.$", "Let $y = \\frac{x}{6}.$") and question_of(p.goal) == "What is $y$?"
    assert p.solution == row["solution"] and p.answer == row["answer"] and rewarded(p, p.solution) == 1.0
    assert any(facts[0].rstrip(".") in text for text, _ in scripted_human(p.goal, []))


def test_a_question_of_one_sentence_has_no_facts():
    p = parse_row({"question": "What is 1 + 1?", "answer": "#### 2"}, 0, equal)
    assert facts_of(p.goal) == () and question_of(p.goal) == p.goal == "What is 1 + 1?"
    assert sum(probability for _, probability in scripted_human(p.goal, [])) == pytest.approx(1)


def test_the_worked_answer_is_the_field_that_has_the_marker():
    row = {"question": "A?", "solution": "It is obvious.", "answer": "1 + 1 = 2. #### 2"}
    assert parse_row(row, 0, equal).solution == row["answer"]
    assert parse_row(row | {"solution": r"\boxed{2}", "answer": 2}, 0, equal).solution == r"\boxed{2}"


@pytest.mark.parametrize("answer", ("", "(", "9^{9^{9}}", r"\frac{1}{", "x" * 201))
def test_a_gold_answer_that_cannot_be_graded_is_an_error_and_never_a_reward(answer):
    with pytest.raises(UserError, match="must"):
        boxed(answer)


def test_calculator_notes_of_gsm8k_are_removed():
    p = parse_row({"question": "A. B?", "answer": "2 + 2 = <<2+2=4>>4 songs.\n#### 4"}, 0, equal)
    assert p.solution == "2 + 2 = 4 songs.\n#### 4"


# The two users --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("speaker", ("human", "overhelpful"))
def test_probabilities_sum_to_one_at_every_point_of_many_dialogues(speaker):
    problems = generate_problems(TASK, "train", 100)
    for p, log in zip(problems, write_logs(TASK, problems, speaker, 0)):
        for m in range(0, len(log["messages"]), 2):
            outcomes = getattr(TASK, speaker)(p.goal, log["messages"][:m])
            assert sum(probability for _, probability in outcomes) == pytest.approx(1, abs=1e-12)
            assert all(probability > 0 for _, probability in outcomes)
            assert len({text for text, _ in outcomes}) == len(outcomes)


def test_the_human_gives_the_fact_asked_for_and_no_other():
    for i, fact in enumerate(FACTS):
        dialogue = say("hi", question_about(fact))
        for text, _ in scripted_human(TOM.goal, dialogue):
            assert revealed_facts(FACTS, [*dialogue, *say(text)]) <= {i}


def test_a_vague_question_gets_the_next_fact_and_often_a_question_back():
    dialogue = say("hi", "How many apples at first?", "7", "Can you tell me everything?")
    assert asked_fact(FACTS, dialogue[-1]["content"], {0}) == 1
    outcomes = scripted_human(TOM.goal, dialogue)
    told = sum(p for text, p in outcomes if revealed_facts(FACTS, [*dialogue, *say(text)]) == {0, 1})
    assert 0.3 < told < 0.6


def test_a_repeated_question_annoys():
    ask = "How many apples at first?"
    outcomes = dict(scripted_human(TOM.goal, say("hi", ask, "7", ask)))
    assert outcomes["i already told you"] > 0.3 and outcomes[LEAVE] >= 0.2


def test_patience_wears_thin():
    def leaving(turns):
        return dict(scripted_human(TOM.goal, say(*["hi", "Hello."] * turns)))[LEAVE]
    assert leaving(2) == leaving(4) < leaving(5) < leaving(8)


@pytest.mark.parametrize("said, right", [
    ("7 + 5 = 13. How many apples away?", "7 + 5 is 12"), ("7 + 5 = 12. How many apples away?", None),
    ("12 - 4 = 9.", "12 - 4 is 8"),
    ("Tom finds 6 more apples. How many apples away?", "Tom finds 5 more apples"),
    ("Tom finds 5 more apples.", None), ("How many apples?", None)])
def test_a_wrong_sum_or_restated_fact_is_objected_to(said, right):
    assert objection(FACTS, said) == right
    texts = [text for text, _ in scripted_human(TOM.goal, say("hi", said))]
    assert (f"no, {right}" in texts) == (right is not None)


def test_the_overhelpful_user_agrees_with_a_wrong_sum_and_tells_everything_at_once():
    wrong = say("hi", "How many?", "12", "7 + 5 = 13. How many apples away?")
    assert all("right" in text for text, _ in overhelpful(TOM.goal, wrong))
    dialogue = say("hi", "How many apples at first?")
    for text, _ in overhelpful(TOM.goal, dialogue):
        assert revealed_facts(FACTS, [*dialogue, *say(text)]) == {0, 1, 2}


def test_neither_script_knows_the_answer():
    p = parse_row({"question": "Tom has 70 apples at first. Tom finds 51 more apples. "
                               "How many apples does Tom have now?",
                   "answer": "70 + 51 = 121. #### 121"}, 0, equal)
    for script in (scripted_human, overhelpful):
        for dialogue in ([], say("hi", "How many apples at first?"), say("hi", "Tell me the answer."),
                         say("hi", "What is it?")):
            assert not any("121" in text for text, _ in script(p.goal, dialogue))


def test_real_problems_work_too_with_and_without_numbers_in_their_facts():
    p = parse_row({"question": "Weng earns $12 an hour for babysitting. Yesterday, she was tired. "
                               "She did 50.5 minutes. How much did she earn?", "answer": "#### 10"}, 0, equal)
    assert asked_fact(facts_of(p.goal), "How many minutes?", set()) == 2
    assert asked_fact(facts_of(p.goal), "Was she tired?", set()) == 1
    for fact in facts_of(p.goal):
        assert sum(w for _, w in given_fact(fact, specific=True)) > 0
        assert question_about(fact).endswith("?")
    bare = parse_row({"question": "What is 2 + 2?", "answer": "#### 4"}, 0, equal)
    for script in (scripted_human, overhelpful):
        for dialogue in ([], say("hi", "What do you know?"), say("hi", "Ok.")):
            assert sum(probability for _, probability in script(bare.goal, dialogue)) == pytest.approx(1)


# The logging assistant and the report card's lines --------------------------------------------------------

def test_the_logging_assistant_is_mediocre():
    """It answers some dialogues right and many wrong, and slips in wrong sums now and then."""
    problems = generate_problems(TASK, "train", 400)
    logs = write_logs(TASK, problems, "human", 0)
    solved = [log["messages"][-1]["content"] == p.solution for p, log in zip(problems, logs)]
    assert 0.3 < sum(solved) / len(solved) < 0.7
    said = [(p, m["content"]) for p, log in zip(problems, logs) for m in log["messages"]
            if m["role"] == "assistant"]
    assert sum(objection(facts_of(p.goal), text) is not None for p, text in said if "####" not in text) > 10


def test_a_guess_about_a_problem_without_a_plain_sum_does_not_give_the_answer_away():
    """Its working cannot be redone with guessed numbers, so nothing of it is shown."""
    half = parse_row({"problem": "Tom has 7 pies. He eats half. How many are left?",
                      "solution": "Half of 7 is \\boxed{3.5}."}, 0, equal)
    guesses = {guessed_solution(half, set(), random.Random(seed)) for seed in range(50)}
    assert all(guess.startswith("#### ") and "3.5" not in guess for guess in guesses) and len(guesses) > 5


@pytest.mark.parametrize("text, counts", [("5", (1, 1)), ("4", (0, 1)), ("4, no wait, 5 more apples", (1, 1)),
                                          ("what do you mean?", (0, 0)),
                                          ("Tom finds 5 more apples. Tom has 8 apples at first.", (1, 2))])
def test_facts_stated_right_by_hand(text, counts):
    assert stated_facts(FACTS, "How many more apples?", set(), text) == counts
