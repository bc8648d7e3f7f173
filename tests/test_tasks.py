"""Problems, splits and the grader."""

import json

import pytest

from tasks import generate_problems, marked_answer, parse_problem, read_problems, reward, split_sentences


def problem(answer="10"):
    return parse_problem({"question": "Tom has 7 apples. How many?", "answer": f"7 + 3 = 10. #### {answer}"},
                         0)


def test_splits_share_no_problem_whatever_the_order_of_facts_and_the_seed():
    splits = [{frozenset(p.facts) for seed in (0, 1) for p in generate_problems(split, 1000, seed)}
              for split in ("train", "validation", "test")]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert generate_problems("train", 50, 3) == generate_problems("train", 50, 3)
    assert generate_problems("train", 50, 3) != generate_problems("train", 50, 4)


def test_generated_answers_are_right():
    for p in generate_problems("train", 500):
        first, more, away = (int(next(f for f in p.facts if word in f).split()[2])
                             for word in ("first", "more", "away"))
        assert int(p.answer) == first + more - away > 0
        assert reward(p, p.solution) == 1.0


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


def test_the_last_marker_counts():
    assert marked_answer("#### 1 then #### 2, \\boxed{3}") == "3"
    assert marked_answer("\\boxed{1}\n#### 2") == "2"
    assert marked_answer("no marker") is None


def test_sentences_are_cut_as_the_human_reveals_them():
    sentences = split_sentences("Tom has 7.5 apples. He eats 2! How many?")
    assert sentences == ["Tom has 7.5 apples.", "He eats 2!", "How many?"]


@pytest.mark.parametrize("line, message", [
    ("{", "not JSON"), ("[]", "expected an object"), ('{"question": "a?"}', "'answer'"),
    ('{"answer": "#### 1"}', "'question'"),
    ('{"question": 3, "answer": "#### 1"}', "'question'"),
    ('{"question": "a?", "answer": "one"}', "must end in '#### n' or a boxed number"),
    ('{"question": "a?", "answer": "#### x"}', "must end in '#### n' or a boxed number"),
    ('{"question": " ", "answer": "#### 1"}', "'question'")])
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
