"""Calibrated Interactive RL from nothing: warm start, calibration, GRPO, evaluation against the human.

    python train.py --task math                  the calibrated method; base and calibrated are scored
    python train.py --task math --method all     all five methods: the paper's table in miniature

The methods differ in where contexts and user turns come from (`user_and_contexts`): problems, reward,
optimiser, steps, group sizes and random draws are the same. Static says one reply instead of H, and only
about problems that have a log.

    base        the warm-started policy, untrained
    static      single replies in logged contexts: a logged dialogue cut before its last assistant message
    naive       whole dialogues with the over-helpful simulator
    calibrated  whole dialogues with the same simulator after fine-tuning on human logs
    human       whole dialogues with the human itself: the upper bound

A run writes into --out: config.json, metrics.csv, sft.csv, samples.jsonl, result.json, curves.png, the
policies in Hugging Face format (policy/ of the method, NAME/policy/ of the others) and both simulators.

With --policy and --simulator the same lines train real language models.
Paper: the three methods and their comparison (arXiv 2605.26403).
"""

import copy
import random
import time
from pathlib import Path

import torch
from tqdm import tqdm

from chat import Chat
from config import METHODS, Config, UserError, command, complete, parse_config
from extras.checkpoint import load_checkpoint, save_checkpoint
from extras.endpoint import EndpointError, EndpointUser, is_endpoint
from extras.grader import with_algebra
from extras.hf import Speaker, save_speaker
from extras.inputs import check_inputs, load_data
from extras.lora import add_adapters, reference_of
from extras.plot import draw_curves, print_table
from extras.records import (METRICS, append_csv, append_samples, begin_folder, forget_after, interval, mean,
                            peak_rss_mb, print_row, read_rows, write_json)
from extras.speakers import base_policy, frozen_dtype, load_simulators
from grpo import advantages, agree, update
from logs import Data, logged_contexts
from model import Transformer, autocast, trainable
from report_card import print_report_card, report_card
from rollout import Trajectory, pad, rollout
from sampling import draw_key
from simulator import ModelUser, ScriptedUser
from tasks import Problem, Task, find_task


# Reinforcement learning -------------------------------------------------------------------------------------

def the_human(config: Config, task: Task):
    """Return who tests the policy, and whom the method `human` trains against."""
    if is_endpoint(config.human):
        return EndpointUser(config.human, task.human_instruction, max_new_tokens=config.max_new_tokens)
    return ScriptedUser(task.human)


def user_and_contexts(method: str, config: Config, data: Data, simulators: dict[str, Speaker]):
    """Return whom a method talks with and, for static, the logged contexts in which it says one reply."""
    if method == "static":
        return ScriptedUser(data.task.human), logged_contexts(data.logs)   # never asked: one reply is all
    if method == "human":
        return the_human(config, data.task), None
    if method == "naive" and is_endpoint(config.simulator):
        return EndpointUser(config.simulator, data.task.simulator_instruction,
                            max_new_tokens=config.max_new_tokens), None
    return ModelUser(*simulators[method], config.max_new_tokens), None


def without_failed(trajectories: list[Trajectory], user, largest: float) -> list[Trajectory]:
    """Return the dialogues that did not fail: every mean is over these.

    Raises: EndpointError if the share of the others is above `largest`: what is left is no fair sample.
    """
    finished = [t for t in trajectories if t.ended != "failed"]
    failed = len(trajectories) - len(finished)
    if failed > largest * len(trajectories):
        raise EndpointError(f"{failed} of {len(trajectories)} dialogues failed, the last because of: "
                            f"{getattr(user, 'last_failure', '') or 'the grader came to no verdict'}")
    return finished


def train_step(step: int, method: str, config: Config, data: Data, chat: Chat, policy: Transformer,
               reference: Transformer, optimiser, user,
               contexts: dict | None) -> tuple[dict, list[Trajectory]]:
    """Roll out P*G dialogues, take the optimiser steps, and return the row of metrics and the dialogues."""
    began, G = time.perf_counter(), config.group_size
    pool = data.train if contexts is None else [p for p in data.train if p.goal in contexts]
    rng = random.Random(draw_key(config.seed, "problems", step))
    problems = [p for p in rng.sample(pool, min(config.prompts, len(pool))) for _ in range(G)]
    key_parts = [(config.seed, "train", step, p.id, i % G) for i, p in enumerate(problems)]
    with autocast(policy.device, config.precision):
        trajectories = rollout(policy, chat, user, data.task, problems, key_parts,
                               horizon=1 if contexts else config.horizon,
                               max_new_tokens=config.max_new_tokens,
                               contexts=[contexts[p.goal] for p in problems] if contexts else None)
    finished = without_failed(trajectories, user, config.max_failed)
    rewards = torch.tensor([t.reward for t in trajectories], device=config.device).view(-1, G)       # (P, G)
    A = advantages(rewards).flatten()                                                                # (B,)
    tokens, action_mask, old_logprobs = pad(trajectories, config.device)                      # (B, T) each
    action_mask &= ~rewards.isnan().view(-1, 1)                          # failed dialogues have no part in it
    groups, stats = torch.arange(len(problems), device=config.device).view(-1, G), []
    for rows in (part.flatten() for part in groups.tensor_split(min(config.minibatches, len(groups)))):
        with autocast(policy.device, config.precision):
            stats.append(update(policy, optimiser, tokens[rows], action_mask[rows], old_logprobs[rows],
                                A[rows], reference=reference, clip_eps=config.clip_eps,
                                kl_coef=config.kl_coef, token_budget=config.token_budget))
    return {"method": method, "step": step, "reward": mean(t.reward for t in finished), "human_score": None,
            "turns": mean(t.turns for t in finished), "kl": mean(s["kl"] for s in stats),
            "ratio_max": max(s["ratio_max"] for s in stats), "clip_frac": mean(s["clip_frac"] for s in stats),
            "frac_zero_std": mean(agree(rewards).flatten().tolist()),
            "grad_norm": mean(s["grad_norm"] for s in stats),
            "tokens": int(action_mask.sum()), "seconds": time.perf_counter() - began,
            "truncated": mean(t.cut > 0 or t.ended == "truncated" for t in finished),
            "failed": len(trajectories) - len(finished)}, trajectories


def against_human(policy: Transformer, chat: Chat, config: Config, task: Task, problems: list[Problem],
                  phase: str) -> list[Trajectory]:
    """Return a dialogue of the policy with the human about every problem, but for those that failed."""
    user, trajectories, B = the_human(config, task), [], config.prompts * config.group_size
    for i in tqdm(range(0, len(problems), B), desc="evaluation", disable=None, leave=False):
        part = problems[i:i + B]
        key_parts = [(config.seed, phase, 0, p.id, 0) for p in part]          # the same for every policy
        with autocast(policy.device, config.precision):
            trajectories += rollout(policy, chat, user, task, part, key_parts, horizon=config.horizon,
                                    max_new_tokens=config.max_new_tokens)
    return without_failed(trajectories, user, config.max_failed)


def train_method(method: str, config: Config, data: Data, policy: Transformer, chat: Chat,
                 simulators: dict[str, Speaker], folder: Path) -> None:
    """Train `policy` in place; evaluate and checkpoint every `eval_every` steps and when servers give up."""
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
            raise UserError(f"{method}, step {step}: {error}; try a lower --lr") from None
        except EndpointError as error:
            if step > 1:
                save_checkpoint(saved, step - 1, policy, optimiser)
            raise EndpointError(f"{method}, step {step}: {error}; --resume continues here") from None
        due, lost = step % config.eval_every == 0 or step == config.steps, None
        try:
            if due:
                evaluated = against_human(policy, chat, config, data.task,
                                          data.validation[:config.eval_problems], "validation")
                row["human_score"] = mean(t.reward for t in evaluated)
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
    trajectories = against_human(policy, chat, config, data.task, data.test[:config.test_problems], "test")
    step = 0 if method in ("base", "evaluated") else config.steps
    append_samples(Path(config.out) / "samples.jsonl", method, step, trajectories[:5])
    rewards = [t.reward for t in trajectories]
    tqdm.write(f"{method}: {mean(rewards):.3f} against the human on {len(rewards)} test problems")
    return {"score": mean(rewards), "ci": interval(rewards), "turns": mean(t.turns for t in trajectories)}


def run(config: Config, data: Data) -> dict:
    """Do what the configuration asks for; return what result.json holds."""
    methods = METHODS if config.method == "all" else tuple(dict.fromkeys(("base", config.method)))
    methods = ("evaluated",) if config.evaluate else methods
    base, chat = base_policy(config, data)
    simulators, card = load_simulators(config, data, methods), {}
    if "calibrated" in methods:
        card = report_card(data.task, data.held_out, {name: model for name, (model, _) in simulators.items()},
                           simulators["naive"][1], seed=config.seed, max_new_tokens=config.max_new_tokens,
                           probes=data.probes, scripted=data.scripted)
        print_report_card(card)
    for model in (base, *(model for model, _ in simulators.values())):
        model.cuda_graphs = config.cuda_graphs
    for name in simulators.keys() - set(methods):                      # one that only the report card needed
        del simulators[name]
    results = {}
    for method in methods:
        started, trains = time.perf_counter(), method not in ("base", "evaluated")
        policy = copy.deepcopy(base) if trains and method != methods[-1] else base    # the last may change it
        folder = Path(config.out) if method == config.method else Path(config.out) / method
        if trains:
            if config.lora_rank:
                add_adapters(policy, config.lora_rank, draw_key(config.seed, "policy adapters"))
            train_method(method, config, data, policy, chat, simulators, folder)
            save_speaker(folder / "policy", policy, chat)
        results[method] = score(policy, chat, method, config, data)
        results[method]["seconds"] = time.perf_counter() - started
    return {"task": config.task, "seed": config.seed, "horizon": config.horizon, "methods": results,
            "report_card": card}


@command
def main(argv: list[str] | None = None) -> None:
    began, config = time.perf_counter(), parse_config(argv, __doc__)
    task, out = with_algebra(find_task(config.task)), Path(config.out)
    config = complete(config, task)
    check_inputs(config)
    data = load_data(config, task)
    begin_folder(config)
    try:
        result = run(config, data)
    except torch.OutOfMemoryError:
        raise UserError("out of memory: lower --token-budget (update) or --prompts (rollout)") from None
    result |= {"seconds": time.perf_counter() - began, "peak_rss_mb": peak_rss_mb()}
    write_json(out / "result.json", result)
    draw_curves(read_rows(out / "metrics.csv"), out / "curves.png",
                result["methods"].get("base", {}).get("score"), task.score)
    comparable = config.preset == "tiny" and not (config.problems or config.evaluate)
    print_table(result["methods"], task.paper, config.task if comparable else "", task.score)
    minutes, peak = result["seconds"] / 60, result["peak_rss_mb"]
    print(f"{minutes:.1f} minutes, peak host memory {peak:.0f} MiB, everything in {out}/")


if __name__ == "__main__":
    main()
