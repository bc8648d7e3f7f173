"""Problems and logs from files and the hub: what is read, and what is named if it cannot be."""

import json
import sys
from types import SimpleNamespace

import pytest
from conftest import say

from config import UserError
from extras.grader import with_algebra
from extras.readers import read_logs, read_problems
from task_math import TASK

GRADED = with_algebra(TASK)


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
    with pytest.raises(UserError, match=message) as error:
        read_problems(str(path), GRADED)
    assert f"{path}, line 3" in str(error.value)


def test_a_line_separator_within_a_text_does_not_end_its_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "a\u2028b?", "answer": "#### 1"}, ensure_ascii=False),
                    encoding="utf-8")
    assert read_problems(str(path), GRADED)[0].goal == "a\u2028b?"


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "a \\ud800?", "answer": "#### 1"}')
    with pytest.raises(UserError, match="line 1: not a text"):
        read_problems(str(path), GRADED)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_problems(str(tmp_path / "none.jsonl"), GRADED)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_problems(str(tmp_path / "empty.jsonl"), GRADED)


def test_a_json_list_and_lines_of_json_give_the_same_problems(tmp_path):
    rows = [{"question": "A. B?", "answer": "#### 1"}, {"problem": "C?", "solution": r"\boxed{2}"}]
    (tmp_path / "list").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, rows)))
    assert read_problems(str(tmp_path / "list"), GRADED) == read_problems(str(tmp_path / "lines"), GRADED)


@pytest.mark.parametrize("text, message", [
    ('[{"question": "a?", "answer": "#### 1"}, {}]', "record 2: 'question'"), ("[]", "is empty"),
    ("[{]", "not JSON"), ("[" * 100_000, "not JSON")])
def test_a_broken_json_list_is_named_with_its_record(tmp_path, text, message):
    path = tmp_path / "problems.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_problems(str(path), GRADED)
    assert str(path) in str(error.value)


def test_a_data_set_of_the_hub_is_read_by_name_and_split(monkeypatch):
    """GSM8K has to be asked for its configuration "main"; most data sets have but one."""
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return [{"question": "A. B?", "answer": "#### 1"}, {"question": "A?"}][:1 if split == "train" else 2]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_problems("hf:openai/gsm8k", GRADED)[0].answer == "1"
    with pytest.raises(UserError, match="hf:a/b:test, record 2: 'solution' or 'answer'"):
        read_problems("hf:a/b:test", GRADED)
    assert asked == [("openai/gsm8k", "main", "train"), ("a/b", None, "test")]


def test_a_hub_that_fails_is_one_line(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network\nand a page of advice")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"^hf:a/b cannot be loaded \(ConnectionError: no network\)$"):
        read_problems("hf:a/b", GRADED)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets$"):
        read_problems("hf:a/b", GRADED)


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
    with pytest.raises(UserError, match=message) as error:
        read_logs(str(path))
    assert f"{path}, line 2" in str(error.value)
