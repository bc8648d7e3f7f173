"""Whole runs in small, and what the command line refuses."""

import csv
import json
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from config import METHODS, parse_config
from extras.hf import load_chat, load_model
from extras.records import METRICS
from train import main

ROOT = Path(__file__).parent.parent
SMALL = ["--sft-steps", "6", "--calibration-steps", "4", "--steps", "2", "--eval-every", "1",
         "--eval-problems", "5", "--test-problems", "8", "--train-problems", "40", "--prompts", "4",
         "--group-size", "2", "--max-new-tokens", "6", "--horizon", "2"]


def rows(path, drop=()):
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if k not in drop} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run of all methods."""
    out = tmp_path_factory.mktemp("run") / "all"
    main(["--task", "math", "--method", "all", "--out", str(out), *SMALL])
    return out


def test_a_run_writes_the_files_that_scripts_rely_on(finished):
    assert {p.name for p in finished.iterdir()} >= {"config.json", "metrics.csv", "sft.csv", "samples.jsonl",
                                                    "result.json", "curves.png",
                                                    "simulator_naive", "simulator_calibrated", *METHODS}
    metrics = rows(finished / "metrics.csv")
    assert tuple(metrics[0]) == METRICS
    assert [(r["method"], r["step"]) for r in metrics] == [(m, s) for m in METHODS[1:] for s in "12"]
    result = json.loads((finished / "result.json").read_text())
    assert set(result) == {"task", "seed", "horizon", "methods", "report_card", "seconds", "peak_rss_mb"}
    assert list(result["methods"]) == list(METHODS)
    for value in result["methods"].values():
        assert set(value) == {"score", "ci", "turns", "seconds"}
        assert value["ci"][0] <= value["score"] <= value["ci"][1]
    assert all(set(row) == {"human", "naive", "calibrated"} for row in result["report_card"].values())
    for line in (finished / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert set(sample) == {"method", "step", "problem", "messages", "reward", "ended"}
        assert sample["ended"] in ("answer", "left", "horizon", "truncated")
    assert {r["phase"] for r in rows(finished / "sft.csv")} == {"policy", "naive", "calibration"}


def test_every_method_saves_a_policy_of_the_same_shape_with_its_tokenizer(finished):
    base = load_model(finished / "base" / "policy")
    for method in METHODS[1:]:
        policy = load_model(finished / method / "policy")
        assert policy.config == base.config
        assert load_chat(finished / method / "policy").vocab_size == base.config.vocab_size


def test_the_same_seed_gives_the_same_run_and_another_seed_another(finished, tmp_path):
    for name, seed in (("again", "0"), ("other", "1")):
        main(["--method", "calibrated", "--out", str(tmp_path / name), "--seed", seed, *SMALL])
    first = [r for r in rows(finished / "metrics.csv", drop=("seconds",)) if r["method"] == "calibrated"]
    assert rows(tmp_path / "again" / "metrics.csv", drop=("seconds",)) == first
    assert rows(tmp_path / "other" / "metrics.csv", drop=("seconds",)) != first
    weights = [load_model(f).lm_head.weight
               for f in (finished / "calibrated" / "policy", tmp_path / "again" / "policy",
                         tmp_path / "other" / "policy")]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_resumed_run_ends_as_an_uninterrupted_one(finished, tmp_path, capsys):
    """Stopped after one step of two, started again: the same rows and, to the bit, the same weights."""
    out = tmp_path / "resumed"
    main(["--method", "naive", "--out", str(out), *SMALL, "--steps", "1"])
    main(["--method", "naive", "--out", str(out), "--resume", *SMALL])
    with pytest.raises(SystemExit):
        main(["--method", "naive", "--out", str(out), "--resume", "--seed", "5", *SMALL])
    assert "was started with another --seed" in capsys.readouterr().err
    checkpoint = out / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(SystemExit):
        main(["--method", "naive", "--out", str(out), "--resume", *SMALL])
    assert "is not a checkpoint of this model" in capsys.readouterr().err
    whole = [r for r in rows(finished / "metrics.csv", drop=("seconds",)) if r["method"] == "naive"]
    assert rows(out / "metrics.csv", drop=("seconds",)) == whole
    assert torch.equal(load_model(out / "policy").lm_head.weight,
                       load_model(finished / "naive" / "policy").lm_head.weight)


def test_a_saved_policy_can_be_scored_and_trained_further(finished, tmp_path, capsys):
    main(["--evaluate", str(finished / "human" / "policy"), "--out", str(tmp_path / "score"), *SMALL])
    result = json.loads((tmp_path / "score" / "result.json").read_text())
    assert list(result["methods"]) == ["evaluated"] and not (tmp_path / "score" / "metrics.csv").exists()
    main(["--policy", str(finished / "human" / "policy"), "--simulator", str(finished / "simulator_naive"),
          "--method", "naive", "--out", str(tmp_path / "further"), *SMALL])
    assert len(rows(tmp_path / "further" / "metrics.csv")) == 2


def test_problems_and_logs_of_ones_own_are_used(tmp_path):
    with open(tmp_path / "problems.jsonl", "w") as file:
        for n in range(12):
            file.write(json.dumps({"question": f"Jo has ${n} and a <|end|>. She earns $2. How much?",
                                   "answer": f"#### {n + 2}"}) + "\n")
    with open(tmp_path / "logs.jsonl", "w") as file:
        for n in range(6):
            file.write(json.dumps({"messages": [{"role": "user", "content": f"help {n}"},
                                                {"role": "assistant", "content": "Ok?"},
                                                {"role": "user", "content": "yes"}]}) + "\n")
    main(["--problems", str(tmp_path / "problems.jsonl"), "--human-logs", str(tmp_path / "logs.jsonl"),
          "--out", str(tmp_path / "run"), *SMALL])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "facts revealed per reply" not in result["report_card"]
    assert "Jo has" in (tmp_path / "run" / "samples.jsonl").read_text()


def test_a_short_training_run_raises_the_reward(tmp_path):
    """Problems of one fact, so that a short warm start can read: the policy learns to ask first instead of
    guessing.
    """
    with open(tmp_path / "easy.jsonl", "w") as file:
        for name in ("Tom", "Anna", "Ben", "Mia", "Sam", "Eva", "Max", "Lily"):
            for item in ("apples", "books", "coins", "pens", "cards", "eggs"):
                for n in range(2, 12):
                    question = f"{name} has {n} {item} at first. How many {item} does {name} have now?"
                    row = {"question": question, "answer": f"#### {n}"}
                    file.write(json.dumps(row) + "\n")
    main(["--method", "human", "--problems", str(tmp_path / "easy.jsonl"), "--out", str(tmp_path / "run"),
          "--sft-steps", "300", "--steps", "12",
          "--prompts", "16", "--eval-every", "12", "--horizon", "3", "--max-new-tokens", "16"])
    rewards = [float(r["reward"]) for r in rows(tmp_path / "run" / "metrics.csv")]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1, rewards


BAD = [("--taks math", "unrecognized arguments: --taks"),
       ("--task poetry", "--task poetry: there is no task_poetry.py (there are: math)"),
       ("--method best", "invalid choice: 'best'"), ("--steps x", "invalid int value: 'x'"),
       ("--horizon 0", "argument --horizon: must be at least 1, got 0"),
       ("--group-size 1", "argument --group-size: must be at least 2, got 1"),
       ("--lr nan", "argument --lr: must be at least 0, got nan"),
       ("--max-failed 1", "argument --max-failed: must be below 1, got 1.0"),
       ("--facts 4", "2 or 3 facts, not 4"),
       ("--problems none.jsonl", "none.jsonl"),
       ("--problems EMPTY", "is empty"), ("--problems BROKEN", "line 1: not JSON"),
       ("--human-logs none.jsonl", "none.jsonl"),
       ("--human-logs EMPTY", "is empty"), ("--human-logs BROKEN", "line 1: not JSON"),
       ("--policy nowhere", "nowhere"),
       ("--policy DIR", "it has no config.json"), ("--evaluate DIR --policy DIR", "not both"),
       ("--test-problems 900000", "at most 200,000"), ("--simulator DIR", "config.json"),
       ("--evaluate nowhere", "nowhere"),
       ("--human-logs LOGS --method static", "static needs logs whose 'goal'"),
       ("--steps", "expected one argument")]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_one_line_on_stderr_and_nothing_written(tmp_path, capsys, arguments, message):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "BROKEN").write_text("{")
    (tmp_path / "LOGS").write_text('{"messages": [{"role": "user", "content": "x"}]}\n' * 5)
    (tmp_path / "DIR").mkdir()
    before = sorted(tmp_path.iterdir())
    words = [str(tmp_path / word) if word in ("EMPTY", "BROKEN", "LOGS", "DIR") else word
             for word in arguments.split()]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--out", str(tmp_path / "run")] if arguments != "--steps"
             else ["--out", str(tmp_path / "run"), "--steps"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error
    assert error.count("\n") == 1 and error.startswith("train.py: ")
    assert sorted(tmp_path.iterdir()) == before


def test_only_a_run_can_be_resumed(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--resume", *SMALL])
    assert "is not a run that can be resumed" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_out_folder_that_exists_or_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path, "exists"), (tmp_path / "file" / "run", "cannot be made")):
        with pytest.raises(SystemExit) as stop:
            main(["--out", str(out), *SMALL])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1


def commands(readme):
    """Every `python X.py ...` and `python -m extras.X ...` of the README's code blocks."""
    for block in re.findall(r"```(?:sh|bash)?\n(.*?)```", readme.replace("\\\n", " "), re.S):
        for line in block.splitlines():
            command = re.sub(r"^([A-Z_]+=\S+ )*", "", line).split("  #")[0].strip()
            if command.startswith("python "):
                yield command


def test_the_readmes_map_names_every_file():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## The map")[1].split("\n## ")[0]
    paths = [*ROOT.glob("*.py"), *ROOT.glob("extras/[a-z]*.py")]
    names = {path.name for path in paths if not path.name.startswith("task_")}
    assert [name for name in sorted(names) if not re.search(rf"\b{re.escape(name)}\b", section)] == []


@lru_cache
def help_of(*script):
    return subprocess.run([sys.executable, *script, "--help"], capture_output=True, text=True, check=True,
                          cwd=ROOT, stdin=subprocess.DEVNULL).stdout


@pytest.mark.parametrize("command", sorted(set(commands((ROOT / "README.md").read_text(encoding="utf-8")))))
def test_every_command_in_the_readme_parses(command):
    """train.py's are parsed for real; of the other scripts every flag must be one that --help knows."""
    _, *words = shlex.split(command)
    if words[0] == "train.py":
        parse_config(words[1:])
    elif words[0] != "-m" or words[1].startswith("extras."):
        script, arguments = (words[:2], words[2:]) if words[0] == "-m" else (words[:1], words[1:])
        assert all(word in help_of(*script) for word in arguments if word.startswith("--"))
        assert (ROOT / (script[-1].replace("extras.", "extras/").removesuffix(".py") + ".py")).is_file()
