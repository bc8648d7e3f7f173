"""A task is one file: tests/task_guess.py is a second one, and no other file knows of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train
from config import METHODS
from tasks import find_task, generate_problems

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TINY = ["--sft-steps", "6", "--calibration-steps", "4", "--steps", "2", "--eval-every", "2",
        "--eval-problems", "4", "--test-problems", "6", "--train-problems", "40", "--prompts", "4",
        "--group-size", "2", "--card-dialogues", "6"]


def test_all_methods_run_on_another_task(tmp_path):
    """With its own horizon, its own reward and its own line on the report card."""
    train.main(["--task", "guess", "--method", "all", *TINY, "--out", str(tmp_path / "run")])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["task"], result["horizon"]) == ("guess", 5)
    assert list(result["methods"]) == list(METHODS)
    own = result["report_card"]["gives the number away"]
    assert set(own) == {"human", "naive", "calibrated"}
    assert own["human"][0] == 0                                        # people say higher, lower or yes
    assert not {"facts revealed per reply", "speaks as the assistant"} & set(result["report_card"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["task"], config["horizon"], config["max_new_tokens"]) == ("guess", 5, 12)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples and all("thinks of a number" in sample["problem"] for sample in samples)


def test_its_problems_are_made_split_and_rewarded_like_any_others():
    task = find_task("guess")
    train, test = ({p.goal for p in generate_problems(task, split, 30)} for split in ("train", "test"))
    assert train and test and not train & test
    problem = generate_problems(task, "train", 1)[0]
    for reply, reward in ((problem.solution, 1.0), ("You think of 99.", 0.0), ("Is it 7?", 0.0)):
        assert task.reward(problem, [{"role": "user", "content": "guess"},
                                     {"role": "assistant", "content": reply}], task.equal) == reward


@pytest.mark.parametrize("script", ("tasks.py", "simulator.py"))
def test_the_scripts_show_it_too(script):
    done = subprocess.run([sys.executable, script, "--task", "guess"], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(TESTS)}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "thinks of a number" in done.stdout


def test_it_is_one_short_file_and_no_other_knows_it():
    assert len((TESTS / "task_guess.py").read_text().splitlines()) <= 60
    knows = [path.name for path in (*ROOT.glob("*.py"), *ROOT.glob("extras/*.py"))
             if any(word in path.read_text() for word in ("guess_", "task_guess", '"guess"', "thinks of"))]
    assert knows == []
