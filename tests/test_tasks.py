"""Problems, splits and the reward."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

import tasks
from grader import GradingError
from simulator import human
from tasks import (LARGEST_SPLIT, generate_problems, marked_answer, parse_problem, read_problems, reward,
                   split_sentences)

TASKS = Path(__file__).parent.parent / "tasks.py"


def problem(answer="10"):
    return parse_problem({"question": "Tom has 7 apples. How many?", "answer": f"7 + 3 = 10. #### {answer}"},
                         0)


def test_splits_share_no_problem_whatever_the_order_of_facts_and_the_seed():
    splits = [{frozenset(p.facts) for seed in (0, 1) for p in generate_problems(split, 1000, seed)}
              for split in ("train", "validation", "test")]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]


def boxed(answer):
    return parse_problem({"problem": "Let $x = 1.$ What is $y$?", "solution": rf"So $\boxed{{{answer}}}.$"},
                         0)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert generate_problems("train", 50, 3) == generate_problems("train", 50, 3)
    assert generate_problems("train", 50, 3) != generate_problems("train", 50, 4)


def test_generated_answers_are_right():
    for p in generate_problems("train", 500):
        first, more, away = (int(next(f for f in p.facts if word in f).split()[2])
                             for word in ("first", "more", "away"))
        assert int(p.answer) == first + more - away > 0
        assert reward(p, p.solution) == 1.0


def test_problems_of_three_facts_are_those_of_every_release():
    """The hash of 1000 problems as generated before two facts could be asked for."""
    text = "\n".join(p.question + p.solution for p in generate_problems("train", 1000))
    assert sha256(text.encode()).hexdigest() == (
        "ebb5e3d5d795b1b47621e6ade1e346755d9ea51cb54cb58e6937e901b0a29834")


def test_problems_of_two_facts_are_one_sum():
    for p in generate_problems("train", 500, facts=2):
        first, more = (int(next(f for f in p.facts if word in f).split()[2]) for word in ("first", "more"))
        assert len(p.facts) == 2
        assert p.solution == f"{first} + {more} = {first + more}. #### {first + more}"


def test_the_largest_split_of_easy_problems_can_be_made_and_no_larger_one_is_tried():
    """The smallest split has 5924; the loop would look for ever for one more."""
    assert len(generate_problems("validation", LARGEST_SPLIT[2], facts=2)) == LARGEST_SPLIT[2]
    with pytest.raises(ValueError, match="at most 4,000 problems of 2 facts"):
        generate_problems("validation", LARGEST_SPLIT[2] + 1, facts=2)
    with pytest.raises(ValueError, match="2 or 3 facts, not 4"):
        generate_problems("train", 1, facts=4)


def test_a_goal_does_not_tell_the_answer():
    p = parse_problem({"question": "Tom has 7 apples. He gets 94 more. How many?", "answer": "#### 101"}, 0)
    assert "101" not in p.goal


@pytest.mark.parametrize("reply", ("#### 10", "#### 10.", "#### $10", "####10",
                                   "so 7 + 3 = 10. #### 10 apples", "#### 10.00",
                                   "#### 9 no #### 10", r"\boxed{10}", "#### 10%", "#### 10\nThat is it."))
def test_a_right_answer_is_accepted_however_it_is_written(reply):
    assert reward(problem(), reply) == 1.0


@pytest.mark.parametrize("reply", ("10", "", "#### ", "#### 11", "#### 10 #### 11", "#### 10 or 11",
                                   "#### -10", "#### 1 0", "####",
                                   "#### ten", "#### 10" + "0" * 10_000, "#### __import__('os')", r"\boxed{",
                                   "#### 1e1"))
def test_anything_else_is_not(reply):
    assert reward(problem(), reply) == 0.0


def test_thousands_commas_and_unicode_minus_do_not_matter():
    assert reward(problem("2,950"), "#### 2950") == 1.0
    assert reward(problem("-3"), "#### \u22123") == 1.0


@pytest.mark.parametrize("gold, reply", [
    (r"\frac{1}{2}", r"so \boxed{\frac{2}{4}}"), (r"\frac{1}{2}", "#### 0.5"), (r"\frac{1}{2}", "#### 1/2"),
    (r"-\frac{1}{2}", "#### \u22121/2"), ("10", r"\boxed{\frac{20}{2}}"), ("10", "#### 20/2"),
    ("$2,950", r"\boxed{2{,}950}"), ("0.0000001", r"\boxed{\frac{1}{10000000}}"), ("x=5", "#### 5"),
    (r"\{1, 2\}", r"\boxed{2, 1}"), (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}")])
def test_an_answer_that_is_no_plain_number_is_graded_by_math_verify(gold, reply):
    assert reward(boxed(gold), reply) == 1.0
    assert reward(boxed(gold), r"\boxed{\frac{7}{3}}") == reward(boxed(gold), "#### 7") == 0.0


def test_a_letter_behind_a_right_number_is_no_unit():
    assert reward(boxed("2x"), "#### 2x") == reward(boxed("3 x"), "#### 3x") == 1.0
    assert reward(boxed("2x"), "#### 2") == reward(boxed("3 x"), "#### 3") == 0.0
    assert reward(boxed("10 apples"), "#### 10") == reward(boxed("10 cm"), "#### 10 centimetres") == 1.0


def test_plain_numbers_never_start_math_verify(monkeypatch):
    """Nor does a sum for a number: writing 7 + 3 is not working it out. 50 for 50% is right here too."""
    monkeypatch.setattr(tasks, "equal", None)
    assert reward(problem("50%"), "#### 50") == reward(problem("50"), "#### 50%") == 1.0
    assert reward(problem(), "#### 7 + 3") == reward(problem(), "#### x = 10") == 0.0


HOSTILE = ("9^{9^{9}}", "9**9**9", "99999999!", "1" * 3_000_000, "{" * 1_000_000, r"\boxed{" * 300_000,
           "#" * 999_999, r"\frac{" * 300_000, r"\frac{1", "\u2212" * 1000, "$" * 1_000_000, " " * 1_000_000)


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:9])
@pytest.mark.parametrize("gold", ("10", r"\frac{1}{2}"))
def test_a_hostile_answer_is_wrong_within_a_bounded_time(gold, answer):
    """Megabytes are read once, and what never ends is never begun."""
    assert reward(boxed(gold), f"#### {answer}") == reward(boxed(gold), rf"\boxed{{{answer}}}") == 0.0
    assert split_sentences(f"A. {answer} B.")


def test_a_grader_that_comes_to_no_verdict_is_no_reward_of_0():
    with pytest.raises(GradingError):
        reward(boxed(r"\frac{1}{2}"), r"\boxed{\binom{99999999}{44444444}}")


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


def test_sentences_are_cut_as_the_human_reveals_them():
    sentences = split_sentences("Tom has 7.5 apples. He eats 2! How many?")
    assert sentences == ["Tom has 7.5 apples.", "He eats 2!", "How many?"]


def test_maths_is_never_cut_and_prices_are_no_maths():
    assert split_sentences("Let $f(x) = 2. X$ and $y = 5.$ Find $y$.") == [
        "Let $f(x) = 2. X$ and $y = 5.$", "Find $y$."]
    assert split_sentences(r"Solve \[x = 1. Y = 2.\] Then \(a. B\) is $$c. D$$. Why?") == [
        r"Solve \[x = 1. Y = 2.\]", r"Then \(a. B\) is $$c. D$$.", "Why?"]
    assert split_sentences("Tom has $5. Anna has $7. How much is left of \\$9?") == [
        "Tom has $5.", "Anna has $7.", "How much is left of \\$9?"]


def test_a_row_of_math_is_a_problem_the_human_can_talk_about():
    row = {"problem": "Let $x = 3.$ Let $y = \\frac{x}{6}.$ What is $y$?", "level": 2,
           "solution": r"We have $y = \frac{3}{6} = \boxed{\frac{1}{2}}.$", "answer": r"\frac{1}{2}"}
    p = parse_problem(row, 0)
    assert p.facts == ("Let $x = 3.$", "Let $y = \\frac{x}{6}.$") and p.ask == "What is $y$?"
    assert p.solution == row["solution"] and p.answer == row["answer"] and reward(p, p.solution) == 1.0
    assert any(p.facts[0].rstrip(".") in text for text, _ in human(p, []))


def test_a_question_of_one_sentence_has_no_facts():
    p = parse_problem({"question": "What is 1 + 1?", "answer": "#### 2"}, 0)
    assert p.facts == () and p.ask == p.goal == "What is 1 + 1?"
    assert sum(probability for _, probability in human(p, [])) == pytest.approx(1)


def test_the_worked_answer_is_the_field_that_has_the_marker():
    row = {"question": "A?", "solution": "It is obvious.", "answer": "1 + 1 = 2. #### 2"}
    assert parse_problem(row, 0).solution == row["answer"]
    assert parse_problem(row | {"solution": r"\boxed{2}", "answer": 2}, 0).solution == r"\boxed{2}"


@pytest.mark.parametrize("answer", ("", "(", "9^{9^{9}}", r"\frac{1}{", "x" * 201))
def test_a_gold_answer_that_cannot_be_graded_is_an_error_and_never_a_reward(answer):
    with pytest.raises(ValueError, match="must"):
        boxed(answer)


@pytest.mark.parametrize("line, message", [
    ("{", "not JSON"), ("[]", "expected an object"), ('{"question": "a?"}', "'answer'"),
    ('{"answer": "#### 1"}', "'question'"),
    ('{"question": 3, "answer": "#### 1"}', "'question'"),
    ('{"question": "a?", "answer": "one"}', "must end in '#### n' or a boxed number"),
    ('{"question": "a?", "answer": "#### x"}', "must end in '#### n' or a boxed number"),
    ('{"question": " ", "answer": "#### 1"}', "'question'"),
    ('{"problem": "a?", "solution": "\\\\boxed{(}"}', "what math-verify can read, got '\\('"),
    ('{"problem": "a?", "solution": "\\\\boxed{1"}', "must end in")])
def test_a_broken_line_is_named_with_its_file(tmp_path, line, message):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "a?", "answer": "#### 1"}) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_problems(str(path))
    assert f"{path}, line 3" in str(error.value)


def test_a_line_separator_within_a_text_does_not_end_its_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "a\u2028b?", "answer": "#### 1"}, ensure_ascii=False),
                    encoding="utf-8")
    assert read_problems(str(path))[0].question == "a\u2028b?"


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "a \\ud800?", "answer": "#### 1"}')
    with pytest.raises(ValueError, match="line 1: not a text"):
        read_problems(str(path))


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_problems(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_problems(str(tmp_path / "empty.jsonl"))


def test_calculator_notes_of_gsm8k_are_removed():
    p = parse_problem({"question": "A. B?", "answer": "2 + 2 = <<2+2=4>>4 songs.\n#### 4"}, 0)
    assert p.solution == "2 + 2 = 4 songs.\n#### 4"


def test_a_json_list_and_lines_of_json_give_the_same_problems(tmp_path):
    rows = [{"question": "A. B?", "answer": "#### 1"}, {"problem": "C?", "solution": r"\boxed{2}"}]
    (tmp_path / "list").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, rows)))
    assert read_problems(str(tmp_path / "list")) == read_problems(str(tmp_path / "lines"))


@pytest.mark.parametrize("text, message", [
    ('[{"question": "a?", "answer": "#### 1"}, {}]', "record 2: 'question'"), ("[]", "is empty"),
    ("[{]", "not JSON"), ("[" * 100_000, "not JSON")])
def test_a_broken_json_list_is_named_with_its_record(tmp_path, text, message):
    path = tmp_path / "problems.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_problems(str(path))
    assert str(path) in str(error.value)


def test_a_data_set_of_the_hub_is_read_by_name_and_split(monkeypatch):
    """GSM8K has to be asked for its configuration "main"; most data sets have but one."""
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return [{"question": "A. B?", "answer": "#### 1"}, {"question": "A?"}][:1 if split == "train" else 2]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_problems("hf:openai/gsm8k")[0].answer == "1"
    with pytest.raises(ValueError, match="hf:a/b:test, record 2: 'solution' or 'answer'"):
        read_problems("hf:a/b:test")
    assert asked == [("openai/gsm8k", "main", "train"), ("a/b", None, "test")]


def test_a_hub_that_fails_is_one_line(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network\nand a page of advice")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"^hf:a/b cannot be loaded \(ConnectionError: no network\)$"):
        read_problems("hf:a/b")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets$"):
        read_problems("hf:a/b")


def run(*flags):
    return subprocess.run([sys.executable, TASKS, *flags], capture_output=True, text=True, timeout=60)


def test_generated_problems_can_be_written_to_a_file_and_read_again(tmp_path):
    path = tmp_path / "easy.jsonl"
    path.write_text(run("--generate", "20", "--facts", "2", "--split", "test", "--seed", "3").stdout)
    assert read_problems(str(path)) == generate_problems("test", 20, seed=3, facts=2)


@pytest.mark.parametrize("flags", (["--generate", "5000", "--facts", "2"], ["--generate", "0"],
                                   ["--facts", "4"], ["--gen", "1"]))
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags):
    done = run(*flags)
    assert done.returncode == 2 and done.stderr.startswith("tasks.py: ") and done.stderr.count("\n") == 1
