"""One dialogue token by token: who said what, and what is trained."""

import csv

import pytest

from config import UserError
from extras.dialogue import print_tokens, token_rows
from rollout import Trajectory
from task_math import TASK
from tasks import generate_problems

PROBLEM = generate_problems(TASK, "test", 1)[0]


@pytest.fixture
def group(chat):
    """Rewards 1, 0, 0, 1; in the first dialogue the length limit cut a reply after two tokens."""
    cut, answer = chat.encode("How many apples?")[:2], [*chat.encode("#### 5"), chat.end]
    pieces = [(chat.open("hi there"), 0), (cut, 1), (chat.extend(cut[-1], "5 or <|end|>"), 0), (answer, 1)]
    tokens = [token for ids, _ in pieces for token in ids]
    mask = [action for ids, action in pieces for _ in ids]
    return [Trajectory(PROBLEM, tokens, mask, [-0.5 * action for action in mask], [], reward, "answer", 2, 1)
            for reward in (1.0, 0.0, 0.0, 1.0)]


def test_every_token_has_its_speaker_and_actions_alone_a_logprob_and_the_dialogues_advantage(chat, group):
    """The forced end-of-turn after a cut reply is the format's; "<|end|>" typed by the user is theirs."""
    rows = token_rows(group, chat)
    said = {speaker: [row["text"] for row in rows if row["speaker"] == speaker]
            for speaker in ("format", "user", "assistant")}
    assert said["format"] == ["<|user|>", "<|end|>", "<|assistant|>", "<|end|>", "<|user|>", "<|end|>",
                              "<|assistant|>"]
    assert "".join(said["user"]).replace(" ", "") == "hithere5or<|end|>"
    assert said["assistant"] == ["How", "many", "####", "5", "<|end|>"]
    for row in rows:
        assert row["action"] == (row["speaker"] == "assistant")
        assert (row["logprob"], row["advantage"]) == (("-0.50", "+1.00") if row["action"] else ("", ""))
    assert [row["turn"] for row in rows if row["action"]] == [1, 1, 2, 2, 2]


def test_the_rows_are_printed_or_written(chat, group, tmp_path, capsys):
    print_tokens(group, chat, "-")
    shown = capsys.readouterr().out.splitlines()
    assert "[1.0, 0.0, 0.0, 1.0]" in shown[0] and shown[1].split()[:3] == ["turn", "speaker", "token"]
    print_tokens(group, chat, str(tmp_path / "dialogue.csv"))
    with open(tmp_path / "dialogue.csv", newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(shown) - 2 == len(token_rows(group, chat))
    with pytest.raises(UserError, match="cannot be written"):
        print_tokens(group, chat, str(tmp_path / "none" / "dialogue.csv"))


def test_a_dialogue_that_the_user_left_at_once_has_no_token_to_show(chat, capsys):
    left = [Trajectory(PROBLEM, [], [], [], [], 0.0, "left", 0, 0)] * 2
    print_tokens(left, chat, "-")
    assert len(capsys.readouterr().out.splitlines()) == 2
