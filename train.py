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

With --policy and --simulator the same lines train real language models; --preset gpu and --preset paper name
some. Presets are sets of defaults: a flag beats a preset, a preset beats a default.
"""

import argparse
import copy
import csv
import json
import math
import os
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from align_sim import (CALIBRATION_STEPS, OWN_BATCH, OWN_LR, OWN_STEPS, SFT_BATCH, SFT_LR, SFT_STEPS,
                       print_report_card, report_card)
from chat import Chat, is_embedded
from data import Data, load_data
from endpoint import EndpointError, EndpointUser, is_endpoint
from grpo import advantages, agree, update
from logs import logged_contexts
from model import Transformer, add_adapters, autocast, reference_of, trainable
from plot import ASSETS, METHODS, draw_curves, print_table, read_csv
from rollout import ASSISTANT, HORIZON, MAX_NEW_TOKENS, Trajectory, append_samples, evaluate, pad, rollout, solved, wilson
from sampling import draw_key
from tasks import Problem
from simulator import HUMAN_USER, NAIVE_USER, ModelUser, ScriptedUser, human
from speakers import calibrated_speaker, frozen_dtype, kept, naive_speaker, warm_start
from weights import Speaker, load_checkpoint, load_config, load_speaker, save_checkpoint, save_speaker

METRICS = ("method", "step", "reward", "human_score", "turns", "kl", "ratio_max", "clip_frac",
           "frac_zero_std", "grad_norm", "tokens", "seconds", "truncated", "failed")
LOG_LINE = ("{method:10s} {step:4d}/{steps}  reward {reward:.3f}  human {score}  turns {turns:.2f}  "
            "kl {kl:6.3f}  ratio {ratio_max:5.2f}  clip {clip_frac:.3f}  same {frac_zero_std:.2f}  "
            "grad {grad_norm:5.2f}  tokens {tokens:6d}  {seconds:5.2f} s")


OWN = {"warm_start": False, "sft_steps": OWN_STEPS, "sft_batch": OWN_BATCH, "sft_lr": OWN_LR,
       "calibration_steps": OWN_STEPS, "train_problems": 1000, "prompts": 8, "lr": 1e-6, "steps": 100, "micro_batch": 4,
       "max_new_tokens": 256, "eval_every": 10, "eval_problems": 64,
       "card_dialogues": 50, "test_problems": 200}
PRESETS = {"tiny": {},
           "own": OWN,                                                # any model that is named by --policy
           "gpu": OWN | {"device": "cuda", "policy": "Qwen/Qwen2.5-0.5B-Instruct",
                         "simulator": "Qwen/Qwen2.5-1.5B-Instruct", "simulator_lora_rank": 32},
           "paper": OWN | {"device": "cuda", "policy": "google/gemma-3-4b-it", "lora_rank": 32, "lr": 1e-5,
                           "simulator": "Qwen/Qwen2.5-7B-Instruct", "simulator_lora_rank": 32}}


def option(default, help: str, choices=None, minimum=None):
    """A field of Config that is also a command-line flag."""
    return field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum})


@dataclass(frozen=True)
class Config:
    """Everything that can be set, each a flag of the same name."""
    task: str = option("math", "what the dialogues are about", choices=("math",))
    method: str = option("calibrated", "which method to train, or all", choices=(*METHODS, "all"))
    preset: str = option("", "a set of defaults: tiny; own, for models of your own (the default with --policy); "
                             "gpu, 24 GB; paper, 80 GB", choices=("", *PRESETS))
    policy: str = option("", "policy to start from: folder, GGUF file or hub id (default: warm-start a tiny one)")
    simulator: str = option("", "naive simulator: the same, or http://HOST:PORT/v1#MODEL (default: the --policy, "
                                "prompted, or a tiny one)")
    human: str = option("scripted", "who tests: scripted, or http://HOST:PORT/v1#MODEL for a prompted model")
    problems: str = option("", "JSONL of problems in GSM8K's or MATH's shape, or hf:openai/gsm8k (default: generated)")
    facts: int = option(3, "facts a generated problem has, 2 or 3", choices=(2, 3))
    human_logs: str = option("", "JSONL of human dialogues to calibrate on (default: the scripted human's)")
    evaluate: str = option("", "score this policy against the human, train nothing")
    out: str = option("out", "folder of the run; must not exist, unless --resume")
    resume: bool = option(False, "continue the run in --out")
    seed: int = option(0, "of every random draw", minimum=0)
    device: str = option("cpu", "where the models live", choices=("cpu", "cuda", "mps"))
    precision: str = option("", "bf16 multiplies matrices in bf16, policy weights stay in fp32 (default: fp32; bf16 "
                                "for other presets than tiny on cuda)", choices=("", "fp32", "bf16"))
    horizon: int = option(HORIZON, "assistant turns a dialogue may have, H", minimum=1)
    group_size: int = option(8, "dialogues a problem, G", minimum=2)
    prompts: int = option(32, "problems a step, P", minimum=1)
    steps: int = option(80, "rollouts, each followed by its optimiser steps", minimum=1)
    minibatches: int = option(2, "optimiser steps a rollout, each on its own share of the problems",
                              minimum=1)
    lr: float = option(1e-3, "learning rate of GRPO", minimum=0)
    clip_eps: float = option(0.2, "ratios beyond 1 - eps and 1 + eps are clipped", minimum=0)
    kl_coef: float = option(0.0, "weight of the KL to the policy before training", minimum=0)
    lora_rank: int = option(0, "rank of the policy's adapters; 0 trains all weights", minimum=0)
    simulator_lora_rank: int = option(0, "rank of the simulator's adapters in calibration; 0 trains all", minimum=0)
    micro_batch: int = option(64, "dialogues a forward and backward pass: lower it if memory runs out",
                              minimum=1)
    max_new_tokens: int = option(MAX_NEW_TOKENS, "tokens a reply may have", minimum=1)
    max_failed: float = option(0.2, "share of a step's dialogues that servers and grader may fail", minimum=0)
    warm_start: bool = option(False, "fine-tune a given --policy on the logs first, as the tiny one is")
    sft_steps: int = option(SFT_STEPS, "warm-start steps of the policy; the tiny naive simulator takes half",
                            minimum=1)
    calibration_steps: int = option(CALIBRATION_STEPS, "fine-tuning steps of the simulator on human logs",
                                    minimum=1)
    sft_lr: float = option(SFT_LR, "learning rate of warm start and calibration", minimum=0)
    sft_batch: int = option(SFT_BATCH, "dialogues a step of warm start and calibration", minimum=1)
    train_problems: int = option(8000, "generated problems to train on", minimum=1)
    eval_every: int = option(5, "steps between evaluations against the human", minimum=1)
    eval_problems: int = option(200, "validation problems of such an evaluation", minimum=1)
    card_dialogues: int = option(300, "held-out dialogues of the report card", minimum=1)
    test_problems: int = option(1000, "problems of the final evaluation", minimum=1)


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
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=meta["help"])
        else:
            shown = meta["help"] + (f" (default: {f.default})" if f.default != "" else "")
            parser.add_argument(flag, type=f.type, default=argparse.SUPPRESS, choices=meta["choices"], help=shown,
                                metavar=None if meta["choices"] else f.type.__name__.upper())
    given = vars(parser.parse_args(argv))
    policy = given.get("policy") or given.get("evaluate")
    preset = given.get("preset") or ("own" if policy and not is_embedded(policy) else "tiny")
    config = Config(**PRESETS[preset] | given | {"preset": preset})
    if not config.precision:
        config = replace(config, precision="bf16" if config.device == "cuda" and preset != "tiny" else "fp32")
    for f in fields(Config):
        value, minimum = getattr(config, f.name), f.metadata["minimum"]
        if minimum is not None and not (minimum <= value < math.inf):
            fail(f"--{f.name.replace('_', '-')} must be at least {minimum}, got {value}")
    return config


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


# Reinforcement learning -------------------------------------------------------------------------------------

def the_human(config: Config):
    """Return who tests the policy, and what the method `human` trains against."""
    if is_endpoint(config.human):
        return EndpointUser(config.human, HUMAN_USER, max_new_tokens=config.max_new_tokens)
    return ScriptedUser(human)


def user_and_contexts(method: str, config: Config, data: Data, simulators: dict[str, Speaker]):
    """Return whom a method talks with and, for static, the logged contexts in which it says one reply."""
    if method == "static":
        return ScriptedUser(human), logged_contexts(data.logs)
    if method == "human":
        return the_human(config), None
    if method == "naive" and is_endpoint(config.simulator):
        return EndpointUser(config.simulator, NAIVE_USER, max_new_tokens=config.max_new_tokens), None
    return ModelUser(*simulators[method], config.max_new_tokens), None


def refuse_failures(trajectories: list[Trajectory], user, largest: float) -> int:
    """Return how many dialogues failed.

    Raises: EndpointError if their share is above `largest`: what is left is no fair sample.
    """
    failed = sum(t.ended == "failed" for t in trajectories)
    if failed > largest * len(trajectories):
        raise EndpointError(f"{failed} of {len(trajectories)} dialogues failed, the last because of: "
                            f"{getattr(user, 'last_failure', None) or 'the grader'}")
    return failed


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
    with autocast(policy.device, config.precision):
        trajectories = rollout(policy, chat, user, problems, keys, horizon=1 if contexts else config.horizon,
                               max_new_tokens=config.max_new_tokens,
                               contexts=[contexts[p.goal] for p in problems] if contexts else None)
    failed = refuse_failures(trajectories, user, config.max_failed)
    rewards = torch.tensor([t.reward for t in trajectories], device=config.device).view(-1, config.group_size)
    A = advantages(rewards).flatten()                                              # (B,)
    tokens, action_mask, old_logprobs = pad(trajectories, config.device)   # (B, T) each
    action_mask &= ~rewards.isnan().view(-1, 1)                            # failed dialogues have no part in it
    groups = torch.arange(len(problems), device=config.device).view(-1, config.group_size)      # (P, G)
    stats = []
    for rows in (part.flatten() for part in groups.chunk(config.minibatches)):
        with autocast(policy.device, config.precision):
            stats.append(update(policy, optimiser, tokens[rows], action_mask[rows], old_logprobs[rows], A[rows],
                                reference=reference, clip_eps=config.clip_eps, kl_coef=config.kl_coef,
                                micro_batch=config.micro_batch))
    finished = [t for t in trajectories if t.ended != "failed"]
    return {"method": method, "step": step, "reward": mean(t.reward for t in finished),
            "human_score": None,
            "turns": mean(t.turns for t in finished), "kl": mean(s["kl"] for s in stats),
            "ratio_max": max(s["ratio_max"] for s in stats), "clip_frac": mean(s["clip_frac"] for s in stats),
            "frac_zero_std": mean(agree(rewards).flatten().tolist()),
            "grad_norm": mean(s["grad_norm"] for s in stats),
            "tokens": int(action_mask.sum()), "seconds": time.perf_counter() - began,
            "truncated": mean(t.cut > 0 or t.ended == "truncated" for t in finished),
            "failed": failed}, trajectories


def against_human(policy: Transformer, chat: Chat, config: Config, problems: list[Problem],
                  phase: str) -> list[Trajectory]:
    """Return a dialogue of the policy with the human about every problem.

    Raises: EndpointError if too many of them failed.
    """
    user = the_human(config)
    with autocast(policy.device, config.precision):
        trajectories = evaluate(policy, chat, user, problems, (config.seed, phase), horizon=config.horizon,
                                max_new_tokens=config.max_new_tokens, batch=config.prompts * config.group_size)
    refuse_failures(trajectories, user, config.max_failed)
    return trajectories


def train_method(method: str, config: Config, data: Data, policy: Transformer, chat: Chat,
                 simulators: dict[str, Speaker], folder: Path) -> None:
    """Train `policy` in place; write a row of metrics a step, evaluate and checkpoint every `eval_every`
    steps, and when servers or grader give up.
    """
    reference = reference_of(policy).to(frozen_dtype(config))
    optimiser = torch.optim.AdamW(trainable(policy), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    user, contexts = user_and_contexts(method, config, data, simulators)
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
        except EndpointError as error:
            if step > 1:
                save_checkpoint(saved, step - 1, policy, optimiser)
            raise EndpointError(f"{method}, step {step}: {error}; --resume continues here") from None
        due = step % config.eval_every == 0 or step == config.steps
        try:
            if due:
                evaluated = against_human(policy, chat, config, data.validation[:config.eval_problems], "validation")
                right, n = solved(evaluated)
                row["human_score"] = right / n
                append_samples(out / "samples.jsonl", method, step,
                               trajectories[:2 * config.group_size:config.group_size] + evaluated[:2])
        finally:                                                # the step is kept even if its evaluation fails
            append_csv(out / "metrics.csv", METRICS, [row])
            print_row(row, config.steps)
            if due:
                save_checkpoint(saved, step, policy, optimiser)


# The run ----------------------------------------------------------------------------------------------------

def score(policy: Transformer, chat: Chat, method: str, config: Config, data: Data) -> dict:
    """Return a policy's score against the human on the test problems, as in result.json."""
    trajectories = against_human(policy, chat, config, data.test[:config.test_problems], "test")
    append_samples(Path(config.out) / "samples.jsonl", method, config.steps, trajectories[:5])
    right, n = solved(trajectories)
    tqdm.write(f"{method}: {right / n:.3f} against the human on {n} test problems")
    return {"score": right / n, "ci": wilson(right, n), "turns": mean(t.turns for t in trajectories)}


def base_policy(config: Config, data: Data) -> Speaker:
    """Return the policy before reinforcement learning: the given one, warm-started if there is none or if asked."""
    source, out = config.evaluate or config.policy, Path(config.out)
    if not source or config.warm_start and not config.evaluate:
        def make() -> Speaker:
            speaker, losses = warm_start(config, data)
            log_losses(out, "policy", losses)
            return speaker
        source = kept(out / "base" / "policy", make)
    return load_speaker(source, ASSISTANT, config.device, frozen_dtype(config) if config.lora_rank else torch.float32)


def load_simulators(config: Config, data: Data, methods: tuple[str, ...]) -> dict[str, Speaker]:
    """Return the simulators that the methods need: naive, given or tiny, and calibrated, made from it."""
    out, source, speakers = Path(config.out), config.simulator, {}
    if not {"naive", "calibrated"} & set(methods) or is_endpoint(source):
        return speakers

    def make(phase: str, speaker: Speaker, losses: list[float]) -> Speaker:
        log_losses(out, phase, losses)
        return speaker

    if not source and config.policy and not is_embedded(config.policy):
        source = config.policy
    source = source or kept(out / "simulator_naive", lambda: make("naive", *naive_speaker(config, data)))
    speakers["naive"] = load_speaker(source, NAIVE_USER, config.device, frozen_dtype(config))
    if "calibrated" in methods:
        folder = kept(out / "simulator_calibrated",
                      lambda: make("calibration", *calibrated_speaker(config, data, source)))
        speakers["calibrated"] = load_speaker(folder, NAIVE_USER, config.device, frozen_dtype(config))
    return speakers


def run(config: Config, data: Data) -> dict:
    """Do what the configuration asks for; return what result.json holds."""
    out = Path(config.out)
    methods = METHODS if config.method == "all" else tuple(dict.fromkeys(("base", config.method)))
    methods = ("evaluated",) if config.evaluate else methods
    base, chat = base_policy(config, data)
    simulators, card = load_simulators(config, data, methods), {}
    if "calibrated" in methods:
        card = report_card(data.held_out, {name: model for name, (model, _) in simulators.items()},
                           simulators["naive"][1],
                           seed=config.seed, max_new_tokens=config.max_new_tokens, probes=data.probes,
                           script=human if data.scripted else None)
        print_report_card(card)
    simulators = {name: speaker for name, speaker in simulators.items() if name in methods}      # frees the others
    results = {}
    for method in methods:
        started, trains = time.perf_counter(), method not in ("base", "evaluated")
        policy = copy.deepcopy(base) if trains and method != methods[-1] else base      # the last may change it
        folder = out if method == config.method else out / method
        if trains:
            if config.lora_rank:
                add_adapters(policy, config.lora_rank, draw_key(config.seed, "policy adapters"))
            train_method(method, config, data, policy, chat, simulators, folder)
            save_speaker(folder / "policy", policy, chat)
        results[method] = score(policy, chat, method, config, data)
        results[method]["seconds"] = time.perf_counter() - started
    return {"task": config.task, "seed": config.seed, "horizon": config.horizon, "methods": results,
            "report_card": card}


def peak_rss_mb() -> float:
    """Return the largest memory that this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def check_inputs(config: Config) -> None:
    """Raise ValueError or EndpointError for what cannot work, before anything is written."""
    if Path(config.out).exists() and not config.resume:
        raise ValueError(f"{config.out} exists: choose another --out, or --resume to continue it")
    if config.device != "cpu" and not getattr(torch, config.device).is_available():
        raise ValueError(f"--device {config.device}: this PyTorch finds none")
    if config.evaluate and config.policy:
        raise ValueError("give --evaluate or --policy, not both: either names the policy")
    if config.warm_start and not config.policy:
        raise ValueError("--warm-start is for a given --policy; the tiny one is warm-started anyway")
    if is_endpoint(config.simulator) and config.method in ("calibrated", "all"):
        raise ValueError(f"--method {config.method} fine-tunes the simulator: it cannot be an endpoint")
    if config.human != "scripted" and not is_endpoint(config.human):
        raise ValueError(f"--human must be scripted or an address as http://HOST:PORT/v1#MODEL, got {config.human}")
    refuse_another_run(config)
    for address, instruction in ((config.simulator, NAIVE_USER), (config.human, HUMAN_USER)):
        if is_endpoint(address):
            EndpointUser(address, instruction).check()
    for source in filter(None, (config.evaluate or config.policy, config.simulator)):
        if not is_endpoint(source):
            load_config(source)


def main(argv: list[str] | None = None) -> None:
    began, config = time.perf_counter(), parse_config(argv)
    out = Path(config.out)
    try:
        check_inputs(config)
        data = load_data(config)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{out} cannot be made: {error.strerror}") from None
        write_json(out / "config.json", asdict(config))
        result = run(config, data)
    except (ValueError, FloatingPointError, OSError, EndpointError) as error:
        fail(str(error))
    except torch.OutOfMemoryError:
        fail("out of memory: lower --micro-batch (update) or --prompts (rollout)")
    result |= {"seconds": time.perf_counter() - began, "peak_rss_mb": peak_rss_mb()}
    write_json(out / "result.json", result)
    base = result["methods"].get("base")
    draw_curves(read_rows(out / "metrics.csv"), out / "curves.png", base and base["score"])
    comparable = config.preset == "tiny" and not (config.problems or config.evaluate) and (ASSETS / "results.csv").exists()
    print_table(result["methods"], show_recorded=comparable)
    minutes, peak = result["seconds"] / 60, result["peak_rss_mb"]
    print(f"{minutes:.1f} minutes, peak memory {peak:.0f} MiB, everything in {out}/")


if __name__ == "__main__":
    main()
