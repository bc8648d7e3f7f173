"""Whole runs with a model of one's own: a small random one with a chat template, servers, adapters, bf16."""

import json
import math
from dataclasses import replace

import pytest
import torch
from test_templates import CHATML, tokenizer
from config import OWN, Config, complete, parse_config
from engine import SHARED
from extras.endpoint import EndpointUser
from extras.hf import load_model, load_speaker, save_speaker, template_chat
from extras.inputs import load_data
from extras.speakers import base_policy, load_simulators
from model import Transformer, tiny_config
from rollout import graded, rollout
from simulator import ScriptedUser
from task_math import TASK
from tasks import GradingError, generate_problems
from train import main

SMALL = ("--sft-steps 3 --calibration-steps 3 --steps 2 --eval-every 1 --eval-problems 4 --card-dialogues 4 "
         "--test-problems 6 --train-problems 20 --prompts 2 --group-size 2 --max-new-tokens 6 "
         "--horizon 2").split()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder in Hugging Face format, as from the hub."""
    folder = tmp_path_factory.mktemp("own") / "model"
    chat = template_chat(tokenizer(CHATML))
    model = Transformer(tiny_config(chat.vocab_size, max_position_embeddings=2048), seed=1)
    save_speaker(folder, model, chat)
    return str(folder)


@pytest.mark.parametrize("options",
                         ("", "--precision bf16", "--lora-rank 2 --simulator-lora-rank 2 --lr 1e-2",
                          "--warm-start --facts 2", "--precision bf16 --lora-rank 2"))
def test_a_model_of_ones_own_runs_end_to_end(own, tmp_path, options):
    main(["--policy", own, "--simulator", own, "--out", str(tmp_path / "run"), *SMALL, *options.split()])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result["methods"]) == {"base", "calibrated"}
    assert "naive" in next(iter(result["report_card"].values()))
    before, after = load_model(own), load_model(tmp_path / "run" / "policy")
    assert before.config.vocab_size == after.config.vocab_size
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "run" / "policy" / name).exists()


def test_the_policy_is_told_what_to_do_and_the_simulator_to_be_a_user(own, tmp_path):
    config = complete(parse_config(["--policy", own, "--out", str(tmp_path / "run"), *SMALL]), TASK)
    data = load_data(config, TASK)
    policy, chat = base_policy(config, data)
    simulator = load_simulators(config, data, ("naive",))["naive"][1]     # the policy's model, prompted
    assert "Help the user with a word problem." in chat.decode(list(chat.head))
    assert "You are a user who wants help" in simulator.decode(list(simulator.head))


def test_recorded_log_probabilities_equal_recomputed_ones_under_autocast(own):
    """In bf16 they agree within its rounding, so that the first importance ratio is about 1."""
    from grpo import policy_loss
    from logprobs import token_logprobs
    from model import autocast
    from rollout import pad
    model, chat = load_speaker(own)
    problems = generate_problems(TASK, "train", 8)
    with autocast(model.device, "bf16"):
        trajectories = rollout(model, chat, ScriptedUser(TASK.human), TASK, problems,
                               [(0, p.id) for p in problems], horizon=2, max_new_tokens=12)
    tokens, mask, recorded = pad(trajectories)
    with autocast(model.device, "bf16"):
        again = token_logprobs(model, tokens, mask)
    _, stats = policy_loss(again, recorded, torch.ones(8), mask, 1.0)
    assert stats["ratio_max"] < 1.1 and mask.sum() > 50


def test_a_beginning_that_is_read_once_for_all_changes_no_dialogue(own):
    """Alone a dialogue reads its instruction itself; among others it gets a copy of what was read once."""
    model, chat = load_speaker(own, "Ask for what is missing, one thing at a time, and then answer.")
    assert len(chat.head) > SHARED
    problems, keys = generate_problems(TASK, "train", 5), [(0, i) for i in range(5)]
    options = dict(horizon=2, max_new_tokens=8)
    together = rollout(model.double(), chat, ScriptedUser(TASK.human), TASK, problems, keys, **options)
    for t, problem, key in zip(together, problems, keys):
        alone, = rollout(model, chat, ScriptedUser(TASK.human), TASK, [problem], [key], **options)
        assert alone.tokens == t.tokens


# Presets ----------------------------------------------------------------------------------------------------

def test_a_flag_beats_a_preset_and_a_preset_beats_the_default(own):
    assert parse_config([]).preset == "tiny" and parse_config([]).lr == Config.lr
    assert parse_config(["--policy", own]).preset == "own"
    assert parse_config(["--policy", own]).lr == OWN["lr"] != Config.lr
    assert parse_config(["--policy", own, "--lr", "0.5"]).lr == 0.5
    assert parse_config(["--preset", "paper"]).policy == "google/gemma-3-4b-it"
    assert parse_config(["--preset", "paper", "--policy", own]).policy == own
    assert parse_config(["--preset", "gpu"]).precision == "bf16" and parse_config([]).precision == "fp32"


# Failures ---------------------------------------------------------------------------------------------------

class FailingUser(ScriptedUser):
    """A user whose server fails in the first dialogue: at its opening, or later."""
    last_failure = "http://host: no answer"

    def __init__(self, turn):
        super().__init__(TASK.human)
        self.turn = turn

    def reply(self, rows, dialogues):
        return [("", "failed") if row == 0 and len(dialogues[row]) // 2 == self.turn else reply
                for row, reply in zip(rows, super().reply(rows, dialogues))]


@pytest.mark.parametrize("turn", (0, 1))
def test_a_failed_dialogue_has_no_reward_and_leaves_the_others_untouched(model, chat, turn):
    problems = generate_problems(TASK, "train", 3)
    keys, options = [(0, p.id) for p in problems], dict(horizon=2, max_new_tokens=4)
    failed, *others = rollout(model, chat, FailingUser(turn), TASK, problems, keys, **options)
    assert failed.ended == "failed" and math.isnan(failed.reward)
    _, *expected = rollout(model, chat, ScriptedUser(TASK.human), TASK, problems, keys, **options)
    for ours, theirs in zip(others, expected, strict=True):
        assert (ours.tokens, ours.reward, ours.ended) == (theirs.tokens, theirs.reward, theirs.ended)


def test_a_grader_that_fails_is_no_reward_of_0():
    problem = generate_problems(TASK, "train", 1)[0]

    def give_up(*_):
        raise GradingError("too long")
    unsure = replace(TASK, equal=give_up)
    reward, ended = graded(unsure, problem, [{"role": "assistant", "content": "#### 5"}], "answer", 1)
    assert math.isnan(reward) and ended == "failed"


def test_a_run_against_a_server_counts_what_failed_and_goes_on(own, tmp_path, server, monkeypatch):
    monkeypatch.setattr(EndpointUser, "__init__", quick(EndpointUser.__init__))
    server.script = lambda request, handler: "it's 5" if request["seed"] % 4 else (422, {"error": "long"})
    main(["--policy", own, "--simulator", server.address, "--method", "naive", "--out", str(tmp_path / "run"),
          *SMALL, "--max-failed", "0.99"])
    failed = [int(row.split(",")[-1])
              for row in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]]
    assert len(failed) == 2 and sum(failed) > 0
    assert '"failed"' not in (tmp_path / "run" / "samples.jsonl").read_text()


def quick(init):
    """Make an endpoint's user pause for no time between tries."""
    return lambda self, *args, **options: init(self, *args, **{"pause": 0.001, "retries": 1, **options})


def test_a_server_that_breaks_down_stops_the_run_which_continues_to_the_same_end(own, tmp_path, server,
                                                                                 capsys, monkeypatch):
    monkeypatch.setattr(EndpointUser, "__init__", quick(EndpointUser.__init__))
    arguments = ["--policy", own, "--simulator", server.address, "--method", "naive", *SMALL]
    server.script = works = lambda request, handler: f"it's {request['seed'] % 7}"
    main([*arguments, "--out", str(tmp_path / "first step"), "--steps", "1"])
    first_step = len(server.requests)
    main([*arguments, "--out", str(tmp_path / "whole")])
    last = len(server.requests) + first_step
    server.script = lambda *call: works(*call) if len(server.requests) <= last else (500, {})
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--resume continues" in error
    assert "naive, step 2: 4 of 4 dialogues failed" in error
    server.script = works
    main([*arguments, "--out", str(tmp_path / "run"), "--resume"])
    assert torch.equal(load_model(tmp_path / "run" / "policy").lm_head.weight,
                       load_model(tmp_path / "whole" / "policy").lm_head.weight)


def test_a_prompted_model_can_play_the_human(own, tmp_path, server):
    main(["--policy", own, "--simulator", own, "--method", "naive", "--human", server.address,
          "--out", str(tmp_path / "run"), *SMALL])
    assert any("You play a person who is stuck" in r["messages"][0]["content"] for r in server.requests)


@pytest.mark.parametrize("arguments, message", [
    ("--simulator SERVER", "fine-tunes the simulator: it cannot be an endpoint"),
    ("--simulator SERVER --method all", "fine-tunes the simulator"),
    ("--simulator http://127.0.0.1:9 --method naive", "#"),
    ("--human nobody", "--human must be scripted or http"),
    ("--cuda-graphs", "--cuda-graphs is for --device cuda"),
    ("--human http://127.0.0.1:9/v1#m", "127.0.0.1:9"),
    ("--warm-start", "--warm-start is for a given --policy"),
    ("--simulator missing.gguf", "missing.gguf is not a model")])
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, capsys, server, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main([*arguments.replace("SERVER", server.address).split(), "--out", str(tmp_path / "run"), *SMALL])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
