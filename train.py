"""Calibrated Interactive RL from nothing: warm start, calibration, GRPO, evaluation against the human.

    python train.py --task math                  the calibrated method; base and calibrated are scored
    python train.py --task math --method all     all five methods: the paper's table in miniature

The methods share everything but where contexts and user turns come from (`user_and_contexts`): problems,
reward, optimiser, steps, group sizes and random draws are the same.

    base        the warm-started policy, untrained
    static      single replies in logged contexts: a logged dialogue cut before its last assistant message
    naive       whole dialogues with the over-helpful simulator
    calibrated  whole dialogues with the same simulator after fine-tuning on human logs
    human       whole dialogues with the human itself: the upper bound

A run writes into --out: config.json, metrics.csv, sft.csv, samples.jsonl, result.json, curves.png, the
policies in Hugging Face format (policy/ of the method, NAME/policy/ of the others) and both simulators.
"""

import argparse
import copy
import csv
import json
import math
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from tqdm import tqdm

from align_sim import (CALIBRATION_STEPS, SFT_BATCH, SFT_LR, SFT_STEPS, calibrate, naive_simulator,
                       print_report_card, report_card, sft)
from chat import Chat, load_chat, save_chat, tiny_chat
from grpo import advantages, update
from logs import logged_contexts, read_logs, split_logs, told_at_once, write_logs, write_probes
from model import ModelConfig, Transformer, load_checkpoint, load_model, save_checkpoint, save_model
from plot import ASSETS, METHODS, draw_curves, print_table, read_csv
from rollout import HORIZON, MAX_NEW_TOKENS, Trajectory, append_samples, evaluate, pad, rollout, wilson
from sampling import draw_key
from simulator import ModelUser, ScriptedUser, human
from tasks import Problem, generate_problems, read_problems

METRICS = ("method", "step", "reward", "human_score", "turns", "kl", "ratio_max", "clip_frac",
           "frac_zero_std", "grad_norm", "tokens", "seconds", "truncated", "failed")
LOG_LINE = ("{method:10s} {step:4d}/{steps}  reward {reward:.3f}  human {score}  turns {turns:.2f}  "
            "kl {kl:6.3f}  ratio {ratio_max:5.2f}  clip {clip_frac:.3f}  same {frac_zero_std:.2f}  "
            "grad {grad_norm:5.2f}  tokens {tokens:6d}  {seconds:5.2f} s")


def option(default, help: str, choices=None, minimum=None):
    """A field of Config that is also a command-line flag."""
    return field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum})


@dataclass(frozen=True)
class Config:
    """Everything that can be set, each a flag of the same name."""
    task: str = option("math", "what the dialogues are about", choices=("math",))
    method: str = option("calibrated", "which method to train, or all", choices=(*METHODS, "all"))
    preset: str = option("tiny", "a set of defaults", choices=("tiny",))
    policy: str = option("", "folder of the policy to start from (default: warm-start a tiny one)")
    simulator: str = option("", "folder of the naive simulator (default: train a tiny one)")
    problems: str = option("", "JSONL of problems in GSM8K's shape (default: generated ones)")
    human_logs: str = option("", "JSONL of human dialogues to calibrate on (default: the scripted human's)")
    evaluate: str = option("", "score the policy in this folder against the human, train nothing")
    out: str = option("out", "folder of the run; must not exist, unless --resume")
    resume: bool = option(False, "continue the run in --out")
    seed: int = option(0, "of every random draw", minimum=0)
    device: str = option("cpu", "where the models live", choices=("cpu", "cuda", "mps"))
    horizon: int = option(HORIZON, "assistant turns a dialogue may have, H", minimum=1)
    group_size: int = option(8, "dialogues a problem, G", minimum=2)
    prompts: int = option(32, "problems a step, P", minimum=1)
    steps: int = option(80, "rollouts, each followed by its optimiser steps", minimum=1)
    minibatches: int = option(2, "optimiser steps a rollout, each on its own share of the problems",
                              minimum=1)
    lr: float = option(1e-3, "learning rate of GRPO", minimum=0)
    clip_eps: float = option(0.2, "ratios beyond 1 - eps and 1 + eps are clipped", minimum=0)
    kl_coef: float = option(0.0, "weight of the KL to the warm-started policy", minimum=0)
    micro_batch: int = option(64, "dialogues a forward and backward pass: lower it if memory runs out",
                              minimum=1)
    max_new_tokens: int = option(MAX_NEW_TOKENS, "tokens a reply may have", minimum=1)
    sft_steps: int = option(SFT_STEPS, "warm-start steps of the policy; the naive simulator takes half",
                            minimum=1)
    calibration_steps: int = option(CALIBRATION_STEPS, "fine-tuning steps of the simulator on human logs",
                                    minimum=1)
    sft_lr: float = option(SFT_LR, "learning rate of warm start and calibration", minimum=0)
    sft_batch: int = option(SFT_BATCH, "dialogues a step of warm start and calibration", minimum=1)
    train_problems: int = option(8000, "generated problems to train on", minimum=1)
    eval_every: int = option(5, "steps between evaluations against the human", minimum=1)
    eval_problems: int = option(200, "validation problems of such an evaluation", minimum=1)
    test_problems: int = option(1000, "problems of the final evaluation", minimum=1)


@dataclass(frozen=True)
class Data:
    """Problems of the three splits, and human dialogues about the first two."""
    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]
    logs: list[dict]            # what people said; to calibrate on, and static contexts
    held_out: list[dict]        # for the report card
    probes: list[dict]          # planted mistakes, for its sycophancy line; none without the scripted human
    scripted: bool              # whether the scripted human wrote the logs


# Files ------------------------------------------------------------------------------------------------------

def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def print_row(row: dict, steps: int) -> None:
    score = "  -  " if row["human_score"] is None else f"{row['human_score']:.3f}"
    tqdm.write(LOG_LINE.format(**row, steps=steps, score=score))


def write_json(path: Path, value) -> None:
    """Write a file that is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def append_csv(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    new = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows({name: f"{v:.5g}" if isinstance(v, float) else v for name, v in row.items()}
                         for row in rows)


def log_losses(out: Path, phase: str, losses: list[float]) -> None:
    append_csv(out / "sft.csv", ("phase", "step", "loss"),
               [{"phase": phase, "step": i, "loss": loss} for i, loss in enumerate(losses, start=1)])
    tqdm.write(f"{phase:12s} loss {losses[0]:.3f} -> {mean(losses[-20:]):.3f} in {len(losses)} steps")


def read_rows(path: Path) -> list[dict]:
    return read_csv(path) if path.exists() else []


def forget_after(path: Path, method: str, step: int) -> None:
    """Drop the rows of a method that a resumed run will write again."""
    rows = read_rows(path)
    stay = [row for row in rows if row["method"] != method or int(row["step"]) <= step]
    if len(stay) < len(rows):
        path.unlink()
        append_csv(path, METRICS, stay)


# Inputs -----------------------------------------------------------------------------------------------------

def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_config(argv: list[str] | None = None) -> Config:
    """Read the command line. A wrong flag or value is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    for f in fields(Config):
        flag, meta = "--" + f.name.replace("_", "-"), f.metadata
        if f.type is bool:
            parser.add_argument(flag, action="store_true", help=meta["help"])
        else:
            shown = meta["help"] + (f" (default: {f.default})" if f.default != "" else "")
            parser.add_argument(flag, type=f.type, default=f.default, choices=meta["choices"], help=shown,
                                metavar=None if meta["choices"] else f.type.__name__.upper())
    config = Config(**vars(parser.parse_args(argv)))
    for f in fields(Config):
        value, minimum = getattr(config, f.name), f.metadata["minimum"]
        if minimum is not None and not (minimum <= value < math.inf):
            fail(f"--{f.name.replace('_', '-')} must be at least {minimum}, got {value}")
    return config


def load_data(config: Config) -> Data:
    """Read or generate problems and human logs.

    Raises: ValueError naming the file and the line of what is wrong.
    """
    if config.problems:
        rows = read_problems(config.problems)
        random.Random(draw_key(config.seed, "split")).shuffle(rows)
        tenth = max(1, len(rows) // 10)
        if len(rows) < 3:
            raise ValueError(f"{config.problems} has {len(rows)} problems: each split needs one")
        validation, test, train = rows[:tenth], rows[tenth:2 * tenth], rows[2 * tenth:]
    else:
        train = generate_problems("train", config.train_problems, config.seed)
        validation = generate_problems("validation", max(300, config.eval_problems), config.seed)
        test = generate_problems("test", config.test_problems, config.seed)
    if config.human_logs:
        data = Data(train, validation, test, *split_logs(read_logs(config.human_logs), config.seed),
                    probes=[], scripted=False)
        gradable = logged_contexts(data.logs).keys() & {problem.goal for problem in train}
        if config.method in ("static", "all") and not gradable:
            raise ValueError(f"{config.human_logs}: static needs logs whose 'goal' is a training problem")
        return data
    logs, held_out = write_logs(train, human, config.seed), write_logs(validation[:300], human, config.seed)
    return Data(train, validation, test, logs, held_out,
                write_probes(validation[:300], held_out, human, config.seed), scripted=True)


def refuse_another_run(config: Config) -> None:
    """Raise ValueError if --resume would continue something else than this run; only --steps may grow."""
    out, path = Path(config.out), Path(config.out) / "config.json"
    if not path.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is not a run that can be resumed: it has no config.json")
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{path} cannot be read, so the run cannot be resumed") from None
    free = ("resume", "out", "steps")
    changed = [name for name, value in asdict(config).items() if name not in free
               and before.get(name) != value]
    if changed or before.get("steps", 0) > config.steps:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        flags = flags or f"--steps above {config.steps}"
        raise ValueError(f"{out} was started with another {flags}: resume it with the same")


# Models before reinforcement learning -----------------------------------------------------------------------

Speaker = tuple[Transformer, Chat]


def keep(folder: Path, model: Transformer, chat: Chat) -> None:
    """Save a model with its tokenizer; the folder is whole or absent."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(model, str(partial))
    save_chat(chat, str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def kept(folder: Path, device: str, make: Callable[[], Speaker]) -> Speaker:
    """Return the model in `folder`; if there is none yet, `make` it and keep it there."""
    if not folder.exists():
        keep(folder, *make())
    return load_model(str(folder), device), load_chat(str(folder))


def warm_start(config: Config, data: Data) -> Speaker:
    """Return a tiny policy fine-tuned on assistant turns: three fifths human logs with a mediocre
    assistant, two fifths fully specified problems with right answers. It can do the sum; what it lacks is
    the dialogue.
    """
    chat, rng = tiny_chat(), random.Random(draw_key(config.seed, "told at once"))
    shown = [told_at_once(problem, rng) for problem in data.train]
    logged = [log["messages"] for log in write_logs(data.train, human, config.seed)]
    cut = len(logged) * 3 // 5
    examples = [chat.render(messages) for messages in logged[:cut] + shown[cut:]]
    model = Transformer(ModelConfig(vocab_size=chat.vocab_size),
                        draw_key(config.seed, "policy weights")).to(config.device)
    losses = sft(model, examples, steps=config.sft_steps, batch=config.sft_batch, lr=config.sft_lr,
                 seed=config.seed, title="warm start of the policy")
    log_losses(Path(config.out), "policy", losses)
    return model, chat


def naive_speaker(config: Config, data: Data) -> Speaker:
    """Return the tiny over-helpful simulator."""
    chat = tiny_chat()
    steps = max(1, config.sft_steps // 2)
    model, losses = naive_simulator(chat, data.train, steps=steps, batch=config.sft_batch, lr=config.sft_lr,
                                    seed=config.seed, device=config.device)
    log_losses(Path(config.out), "naive", losses)
    return model, chat


def calibrated_speaker(config: Config, data: Data, naive: Speaker) -> Speaker:
    """Return the naive simulator after fine-tuning on human logs."""
    model, chat = copy.deepcopy(naive[0]), naive[1]
    losses = calibrate(model, chat, data.logs, steps=config.calibration_steps, batch=config.sft_batch,
                       lr=config.sft_lr, seed=config.seed)
    log_losses(Path(config.out), "calibration", losses)
    return model, chat


def user_and_contexts(method: str, data: Data, simulators: dict[str, Speaker], max_new_tokens: int):
    """Return whom a method talks with and, for static, the logged contexts in which it says one reply."""
    if method == "static":
        return ScriptedUser(human), logged_contexts(data.logs)
    if method == "human":
        return ScriptedUser(human), None
    return ModelUser(*simulators[method], max_new_tokens), None


# Reinforcement learning -------------------------------------------------------------------------------------

def train_step(step: int, method: str, config: Config, data: Data, chat: Chat, policy: Transformer,
               reference: Transformer, optimiser, user,
               contexts: dict | None) -> tuple[dict, list[Trajectory]]:
    """Roll out P problems times G dialogues, take the optimiser steps, and return the row of metrics and
    the dialogues.
    """
    began = time.perf_counter()
    pool = data.train if contexts is None else [p for p in data.train if p.goal in contexts]
    rng = random.Random(draw_key(config.seed, "problems", step))
    problems = [p for p in rng.sample(pool, min(config.prompts, len(pool))) for _ in range(config.group_size)]
    keys = [(config.seed, "train", step, p.id, i % config.group_size) for i, p in enumerate(problems)]
    trajectories = rollout(policy, chat, user, problems, keys, horizon=1 if contexts else config.horizon,
                           max_new_tokens=config.max_new_tokens,
                           contexts=[contexts[p.goal] for p in problems] if contexts else None)
    rewards = torch.tensor([t.reward for t in trajectories], device=config.device).view(-1, config.group_size)
    A = advantages(rewards).flatten()                                              # (B,)
    tokens, action_mask, old_logprobs = pad(trajectories, config.device)   # (B, T) each
    groups = torch.arange(len(problems), device=config.device).view(-1, config.group_size)      # (P, G)
    stats = []
    for rows in (part.flatten() for part in groups.chunk(config.minibatches)):
        stats.append(update(policy, optimiser, tokens[rows], action_mask[rows], old_logprobs[rows], A[rows],
                            reference=reference, clip_eps=config.clip_eps, kl_coef=config.kl_coef,
                            micro_batch=config.micro_batch))
    return {"method": method, "step": step, "reward": mean(t.reward for t in trajectories),
            "human_score": None,
            "turns": mean(t.turns for t in trajectories), "kl": mean(s["kl"] for s in stats),
            "ratio_max": max(s["ratio_max"] for s in stats), "clip_frac": mean(s["clip_frac"] for s in stats),
            "frac_zero_std": mean((rewards == rewards[:, :1]).all(1).tolist()),
            "grad_norm": mean(s["grad_norm"] for s in stats),
            "tokens": int(action_mask.sum()), "seconds": time.perf_counter() - began,
            "truncated": mean(t.cut > 0 or t.ended == "truncated" for t in trajectories),
            "failed": 0}, trajectories


def train_method(method: str, config: Config, data: Data, policy: Transformer, chat: Chat,
                 simulators: dict[str, Speaker], folder: Path) -> None:
    """Train `policy` in place; write a row of metrics a step, evaluate and checkpoint every `eval_every`
    steps.
    """
    reference = copy.deepcopy(policy)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    user, contexts = user_and_contexts(method, data, simulators, config.max_new_tokens)
    out, saved = Path(config.out), folder / "checkpoint.safetensors"
    done = load_checkpoint(saved, policy, optimiser)
    forget_after(out / "metrics.csv", method, done)
    for step in tqdm(range(done + 1, config.steps + 1), desc=method, initial=done, total=config.steps,
                     disable=None, leave=False):
        try:
            row, trajectories = train_step(step, method, config, data, chat, policy, reference, optimiser,
                                           user, contexts)
        except FloatingPointError as error:
            raise ValueError(f"{method}, step {step}: {error}; try a lower --lr") from None
        if step % config.eval_every == 0 or step == config.steps:
            against_human = evaluate(policy, chat, ScriptedUser(human),
                                     data.validation[:config.eval_problems], (config.seed, "validation"),
                                     horizon=config.horizon, max_new_tokens=config.max_new_tokens)
            row["human_score"] = mean(t.reward for t in against_human)
            append_samples(out / "samples.jsonl", method, step,
                           trajectories[:2 * config.group_size:config.group_size] + against_human[:2])
        append_csv(out / "metrics.csv", METRICS, [row])
        print_row(row, config.steps)
        if row["human_score"] is not None:
            save_checkpoint(saved, step, policy, optimiser)


# The run ----------------------------------------------------------------------------------------------------

def score(policy: Transformer, chat: Chat, method: str, config: Config, data: Data) -> dict:
    """Return a policy's score against the human on the test problems, as in result.json."""
    problems = data.test[:config.test_problems]
    trajectories = evaluate(policy, chat, ScriptedUser(human), problems, (config.seed, "test"),
                            horizon=config.horizon, max_new_tokens=config.max_new_tokens)
    append_samples(Path(config.out) / "samples.jsonl", method, config.steps, trajectories[:5])
    solved = sum(t.reward for t in trajectories)
    tqdm.write(f"{method}: {solved / len(problems):.3f} against the human on {len(problems)} test problems")
    return {"score": solved / len(problems), "ci": wilson(solved, len(problems)),
            "turns": mean(t.turns for t in trajectories)}


def run(config: Config, data: Data, given: dict[str, Speaker]) -> dict:
    """Do what the configuration asks for; return what result.json holds. `given`: policy, simulator,
    neither.
    """
    out = Path(config.out)
    methods = METHODS if config.method == "all" else tuple(dict.fromkeys(("base", config.method)))
    methods = ("evaluated",) if config.evaluate else methods
    base, chat = given.get("policy") or kept(out / "base" / "policy", config.device,
                                             lambda: warm_start(config, data))
    simulators, card = {}, {}
    if {"naive", "calibrated"} & set(methods):
        simulators["naive"] = naive = given.get("simulator") or kept(
            out / "simulator_naive", config.device, lambda: naive_speaker(config, data))
    if "calibrated" in methods:
        simulators["calibrated"] = kept(out / "simulator_calibrated", config.device,
                                        lambda: calibrated_speaker(config, data, naive))
        card = report_card(data.held_out, {name: model for name, (model, _) in simulators.items()}, naive[1],
                           seed=config.seed, max_new_tokens=config.max_new_tokens, probes=data.probes,
                           script=human if data.scripted else None)
        print_report_card(card)
    results = {}
    for method in methods:
        started, policy = time.perf_counter(), copy.deepcopy(base)
        folder = out if method == config.method else out / method
        if method not in ("base", "evaluated"):
            train_method(method, config, data, policy, chat, simulators, folder)
            keep(folder / "policy", policy, chat)
        results[method] = score(policy, chat, method, config, data)
        results[method]["seconds"] = time.perf_counter() - started
    return {"task": config.task, "seed": config.seed, "horizon": config.horizon, "methods": results,
            "report_card": card}


def peak_rss_mb() -> float:
    """Return the largest memory that this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main(argv: list[str] | None = None) -> None:
    began, config = time.perf_counter(), parse_config(argv)
    out = Path(config.out)
    try:
        if out.exists() and not config.resume:
            raise ValueError(f"{out} exists: choose another --out, or --resume to continue it")
        if config.device != "cpu" and not getattr(torch, config.device).is_available():
            raise ValueError(f"--device {config.device}: this PyTorch finds none")
        if config.evaluate and config.policy:
            raise ValueError("give --evaluate or --policy, not both: either names the policy")
        folders = {"policy": config.evaluate or config.policy, "simulator": config.simulator}
        given = {name: (load_model(folder, config.device), load_chat(folder))
                 for name, folder in folders.items() if folder}
        for name, (model, chat) in given.items():
            if chat.vocab_size > model.config.vocab_size:
                raise ValueError(f"{folders[name]} has more tokens than its model has scores")
        refuse_another_run(config)
        data = load_data(config)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{out} cannot be made: {error.strerror}") from None
        write_json(out / "config.json", asdict(config))
        result = run(config, data, given)
    except (ValueError, FloatingPointError, OSError) as error:
        fail(str(error))
    result |= {"seconds": time.perf_counter() - began, "peak_rss_mb": peak_rss_mb()}
    write_json(out / "result.json", result)
    base = result["methods"].get("base")
    draw_curves(read_rows(out / "metrics.csv"), out / "curves.png", base and base["score"])
    comparable = not (config.problems or config.evaluate) and (ASSETS / "results.csv").exists()
    print_table(result["methods"], show_recorded=comparable)
    minutes, peak = result["seconds"] / 60, result["peak_rss_mb"]
    print(f"{minutes:.1f} minutes, peak memory {peak:.0f} MiB, everything in {out}/")


if __name__ == "__main__":
    main()
