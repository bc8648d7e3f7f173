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

import copy
import json
import random
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from chat import Chat
from config import Config, fail, parse_config
from data import Data, load_data
from endpoint import EndpointError, EndpointUser, is_endpoint
from grpo import advantages, agree, update
from logs import logged_contexts
from lora import add_adapters, reference_of, trainable
from model import Transformer, autocast
from plot import ASSETS, METHODS, draw_curves, print_table
from records import METRICS, append_csv, append_samples, forget_after, mean, print_row, read_rows, write_json
from report_card import print_report_card, report_card
from rollout import Trajectory, evaluate, pad, rollout, solved, wilson
from sampling import draw_key
from simulator import HUMAN_USER, NAIVE_USER, ModelUser, ScriptedUser, human
from speakers import base_policy, frozen_dtype, load_simulators
from tasks import Problem
from weights import Speaker, load_checkpoint, load_config, save_checkpoint, save_speaker


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
    free = ("resume", "out", "steps", "token_budget", "cuda_graphs")      # they change rounding at most
    changed = [name for name, value in asdict(config).items() if name not in free
               and before.get(name) != value]
    if changed:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        raise ValueError(f"{out} was started with another {flags}: resume it with the same")
    if before.get("steps", 0) > config.steps:
        raise ValueError(f"{out} was started with --steps {before['steps']}: resume it with as many or more")


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
                            f"{getattr(user, 'last_failure', '') or 'the grader came to no verdict'}")
    return failed


def train_step(step: int, method: str, config: Config, data: Data, chat: Chat, policy: Transformer,
               reference: Transformer, optimiser, user,
               contexts: dict | None) -> tuple[dict, list[Trajectory]]:
    """Roll out P*G dialogues, take the optimiser steps, and return the row of metrics and the dialogues."""
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
    action_mask &= ~rewards.isnan().view(-1, 1)                          # failed dialogues have no part in it
    groups = torch.arange(len(problems), device=config.device).view(-1, config.group_size)      # (P, G)
    stats = []
    for rows in (part.flatten() for part in groups.tensor_split(min(config.minibatches, len(groups)))):
        with autocast(policy.device, config.precision):
            stats.append(update(policy, optimiser, tokens[rows], action_mask[rows], old_logprobs[rows],
                                A[rows], reference=reference, clip_eps=config.clip_eps,
                                kl_coef=config.kl_coef, token_budget=config.token_budget))
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
                                max_new_tokens=config.max_new_tokens,
                                batch=config.prompts * config.group_size)
    refuse_failures(trajectories, user, config.max_failed)
    return trajectories


def train_method(method: str, config: Config, data: Data, policy: Transformer, chat: Chat,
                 simulators: dict[str, Speaker], folder: Path) -> None:
    """Train `policy` in place; write a row of metrics a step, evaluate and checkpoint every `eval_every`
    steps, and when servers or grader give up.
    """
    reference = reference_of(policy).to(frozen_dtype(config))
    optimiser = torch.optim.AdamW(trainable(policy), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=True)
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
        due, lost = step % config.eval_every == 0 or step == config.steps, None
        try:
            if due:
                evaluated = against_human(policy, chat, config, data.validation[:config.eval_problems],
                                          "validation")
                right, n = solved(evaluated)
                row["human_score"] = right / n
                append_samples(out / "samples.jsonl", method, step,
                               trajectories[:2 * config.group_size:config.group_size] + evaluated[:2])
        except EndpointError as error:                         # the step is kept all the same
            lost = EndpointError(f"{method}, evaluation at step {step}: {error}; --resume continues after it")
        append_csv(out / "metrics.csv", METRICS, [row])
        print_row(row, config.steps)
        if due:
            save_checkpoint(saved, step, policy, optimiser)
        if lost:
            raise lost


# The run ----------------------------------------------------------------------------------------------------

def score(policy: Transformer, chat: Chat, method: str, config: Config, data: Data) -> dict:
    """Return a policy's score against the human on the test problems, as in result.json."""
    trajectories = against_human(policy, chat, config, data.test[:config.test_problems], "test")
    append_samples(Path(config.out) / "samples.jsonl", method, config.steps, trajectories[:5])
    right, n = solved(trajectories)
    tqdm.write(f"{method}: {right / n:.3f} against the human on {n} test problems")
    return {"score": right / n, "ci": wilson(right, n), "turns": mean(t.turns for t in trajectories)}


def run(config: Config, data: Data) -> dict:
    """Do what the configuration asks for; return what result.json holds."""
    out = Path(config.out)
    methods = METHODS if config.method == "all" else tuple(dict.fromkeys(("base", config.method)))
    methods = ("evaluated",) if config.evaluate else methods
    base, chat = base_policy(config, data)
    simulators, card = load_simulators(config, data, methods), {}
    if "calibrated" in methods:
        card = report_card(data.held_out, {name: model for name, (model, _) in simulators.items()},
                           simulators["naive"][1], seed=config.seed, max_new_tokens=config.max_new_tokens,
                           probes=data.probes, script=human if data.scripted else None)
        print_report_card(card)
    for model in (base, *(model for model, _ in simulators.values())):
        model.cuda_graphs = config.cuda_graphs
    for name in simulators.keys() - set(methods):                      # one that only the report card needed
        del simulators[name]
    results = {}
    for method in methods:
        started, trains = time.perf_counter(), method not in ("base", "evaluated")
        policy = copy.deepcopy(base) if trains and method != methods[-1] else base    # the last may change it
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
    if config.cuda_graphs and config.device != "cuda":
        raise ValueError("--cuda-graphs is for --device cuda")
    if config.evaluate and config.policy:
        raise ValueError("give --evaluate or --policy, not both: either names the policy")
    if config.warm_start and not config.policy:
        raise ValueError("--warm-start is for a given --policy; the tiny one is warm-started anyway")
    if is_endpoint(config.simulator) and config.method in ("calibrated", "all"):
        raise ValueError(f"--method {config.method} fine-tunes the simulator: it cannot be an endpoint")
    if config.human != "scripted" and not is_endpoint(config.human):
        raise ValueError(f"--human must be scripted or http://HOST:PORT/v1#MODEL, got {config.human}")
    refuse_another_run(config)
    for address, instruction in ((config.simulator, NAIVE_USER), (config.human, HUMAN_USER)):
        if is_endpoint(address):
            EndpointUser(address, instruction).check()
    for source in filter(None, (config.evaluate or config.policy, config.simulator)):
        if not is_endpoint(source):
            load_config(source)


def main(argv: list[str] | None = None) -> None:
    began, config = time.perf_counter(), parse_config(argv, __doc__)
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
        fail("out of memory: lower --token-budget (update) or --prompts (rollout)")
    result |= {"seconds": time.perf_counter() - began, "peak_rss_mb": peak_rss_mb()}
    write_json(out / "result.json", result)
    base = result["methods"].get("base")
    draw_curves(read_rows(out / "metrics.csv"), out / "curves.png", base and base["score"])
    comparable = config.preset == "tiny" and not (config.problems or config.evaluate)
    print_table(result["methods"], show_recorded=comparable and (ASSETS / "results.csv").exists())
    minutes, peak = result["seconds"] / 60, result["peak_rss_mb"]
    print(f"{minutes:.1f} minutes, peak host memory {peak:.0f} MiB, everything in {out}/")


if __name__ == "__main__":
    main()
