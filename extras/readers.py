"""Rows and human logs from files: JSONL, JSON lists, data sets of the Hugging Face hub.

    read_problems("gsm8k.jsonl", task)  read_problems("hf:openai/gsm8k:test", task)  read_logs("chats.jsonl")

What a row must hold is for the task to say (`Task.parse`). Whatever cannot be read is named with its file
and line.
"""

import json

from config import UserError
from tasks import Problem, Task


def check_text(text: str) -> None:
    """Raise UserError for text that no tokenizer takes: JSON may hold half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"not a text: {error.reason} at character {error.start + 1}") from None


def read_text(path: str) -> str:
    """Return a file's text.

    Raises: UserError if it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_json(text: str, place: str) -> object:
    """Return what a JSON text holds.

    Raises: UserError naming the place if it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from None


def parse_lines(text: str, path: str) -> list[tuple[str, object]]:
    """Return (place, record) for every line of a file's text that is not blank.

    Raises: UserError if there is none, or one that is not JSON.
    """
    records = []
    for line, record in enumerate(text.split("\n"), start=1):
        if record.strip():
            place = f"{path}, line {line}"
            records.append((place, parse_json(record, place)))
    if not records:
        raise UserError(f"{path} is empty")
    return records


def read_hub(path: str) -> list[dict]:
    """Return the rows of `hf:NAME` or `hf:NAME:SPLIT`, a data set of the Hugging Face hub.

    Raises: UserError if the datasets package is missing or cannot load it.
    """
    name, _, split = path.removeprefix("hf:").partition(":")
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{path} needs the datasets package: pip install datasets") from None
    try:
        return list(load_dataset(name, "main" if name.endswith("/gsm8k") else None, split=split or "train"))
    except Exception as error:                              # network, hub and cache have errors of their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} cannot be loaded ({reason})") from None


def read_rows(path: str) -> list[tuple[str, object]]:
    """Return (place, row) for every row of a JSONL file, a JSON list or a data set of the hub.

    Raises: UserError if there are none, or naming what cannot be read.
    """
    if path.startswith("hf:"):
        rows = read_hub(path)
    else:
        text = read_text(path)
        if not text.lstrip().startswith("["):
            return parse_lines(text, path)
        rows = parse_json(text, path)
    if not rows:
        raise UserError(f"{path} is empty")
    return [(f"{path}, record {record}", row) for record, row in enumerate(rows, start=1)]


def read_problems(path: str, task: Task) -> list[Problem]:
    """Read a task's problems from a JSONL file, a JSON list, or `hf:openai/gsm8k`, `hf:openai/gsm8k:test`.

    Raises: UserError naming the file and the line or record.
    """
    problems = []
    for place, row in read_rows(path):
        try:
            problem = task.parse(row, len(problems), task.equal)
            check_text(problem.goal + problem.answer + problem.solution)
            problems.append(problem)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    return problems


def check_log(row: object) -> None:
    """Raise UserError unless a row is a log: user and assistant take turns, the user first."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError("expected an object with a list 'messages'")
    if not isinstance(row.get("goal", ""), str):
        raise UserError(f"'goal' must be a text, got {row['goal']!r}")
    for i, message in enumerate(messages):
        role = ("user", "assistant")[i % 2]
        if not isinstance(message, dict) or message.get("role") != role:
            raise UserError(f"message {i + 1} must be the {role}'s: they take turns")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise UserError(f"message {i + 1} must have a text that is not empty as 'content'")
    check_text("".join([row.get("goal", ""), *(message["content"] for message in messages)]))


def read_logs(path: str) -> list[dict]:
    """Read dialogues, a line each: {"messages": [{"role", "content"}, ...]} and perhaps "goal", what the
    user wanted.

    Raises: UserError naming the file and the line.
    """
    logs = []
    for place, row in parse_lines(read_text(path), path):
        try:
            check_log(row)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        logs.append(row)
    return logs
