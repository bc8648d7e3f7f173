"""Simulator calibration: supervised fine-tuning on human dialogues, and a report card that says what it
changed.

The first half of Calibrated Interactive RL. A prompted simulator does not behave like people; a policy
trained against it learns to exploit the difference. So the simulator is first fine-tuned on human dialogues,
with the loss on the user's tokens alone: the assistant's are context. `report_card` then puts naive and
calibrated simulator beside the human, on dialogues that neither has seen.

Paper: section on simulator alignment (arXiv 2605.26403); the loss is `sft`, which also warm-starts the
policy.

Run `python align_sim.py` to calibrate the embedded simulator (about 4 minutes), or
`python align_sim.py --human-logs chats.jsonl --simulator DIR --out DIR` for logs and a simulator of your own.
"""

import argparse
import copy
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from chat import Chat, load_chat, save_chat, tiny_chat
from logs import read_logs, split_logs, write_logs, write_probes
from model import ModelConfig, Transformer, load_model, save_model, token_logprobs
from rollout import MAX_NEW_TOKENS
from sampling import Engine, draw_key
from simulator import (SUM, asked_fact, human, numbers, objection, overhelpful, revealed_facts,
                       simulator_messages, split_leave, states, words)
from tasks import Problem, generate_problems, split_sentences

SFT_STEPS, CALIBRATION_STEPS, SFT_BATCH, SFT_LR = 1600, 2000, 32, 3e-3         # the tiny preset's
NLL, AGREES = "NLL of the human's words (nats a token)", "agrees with a wrong sum or fact"     # of the card
Example = tuple[list[int], list[int]]           # ids and mask of a dialogue, as `Chat.render` returns them


def pad_examples(examples: list[Example], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, (B, T) each, padded on the right."""
    T = max(len(ids) for ids, _ in examples)
    tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in examples], device=device)
    return tokens, torch.tensor([mask + [0] * (T - len(mask)) for _, mask in examples], device=device).bool()


def sft(model: Transformer, examples: list[Example], *, steps: int, batch: int, lr: float, seed: int,
        micro_batch: int = 16, title: str = "sft") -> list[float]:
    """Fine-tune on the masked tokens and return the loss of every step, in nats a token.

    One normaliser a step, its number of masked tokens, so the split into length-sorted micro-batches, which
    spares padding, does not change the gradient. The learning rate warms up over 20 steps and decays to a
    tenth by a cosine.

    Raises: FloatingPointError if the loss is not finite; ValueError if there is nothing to learn.
    """
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples if any(mask[:room])]
    if not examples:
        raise ValueError(f"{title}: no dialogue has a token to learn within {room} tokens")
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    rng, order, losses = random.Random(seed), [], []
    for step in tqdm(range(steps), desc=title, disable=None, leave=False):
        while len(order) < batch:
            order += rng.sample(range(len(examples)), len(examples))
        rows, order = order[:batch], order[batch:]
        rows.sort(key=lambda row: len(examples[row][0]))
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 20, decay)
        optimiser.zero_grad(set_to_none=True)
        normaliser, total = sum(sum(examples[row][1]) for row in rows), 0.0
        for i in range(0, batch, micro_batch):
            tokens, mask = pad_examples([examples[row] for row in rows[i:i + micro_batch]], model.device)
            loss = -token_logprobs(model, tokens, mask).sum() / normaliser
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise FloatingPointError(f"{title}: the loss is {total} at step {step + 1}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(total)
    return losses


def naive_simulator(chat: Chat, problems: list[Problem], *, steps: int, batch: int, lr: float, seed: int,
                    device: str = "cpu") -> tuple[Transformer, list[float]]:
    """Return a tiny simulator that was fine-tuned on over-helpful users, as prompted language models are,
    and the losses.
    """
    model = Transformer(ModelConfig(vocab_size=chat.vocab_size),
                        draw_key(seed, "simulator weights")).to(device)
    examples = [chat.render(simulator_messages(log)) for log in write_logs(problems, overhelpful, seed)]
    return model, sft(model, examples, steps=steps, batch=batch, lr=lr, seed=seed, title="naive simulator")


def calibrate(simulator: Transformer, chat: Chat, logs: list[dict], *, steps: int, batch: int, lr: float,
              seed: int) -> list[float]:
    """Fine-tune a simulator in place on what people said in `logs`; return the losses."""
    examples = [chat.render(simulator_messages(log)) for log in logs]
    return sft(simulator, examples, steps=steps, batch=batch, lr=lr, seed=seed, title="calibration")


# Report card ------------------------------------------------------------------------------------------------

def stated_facts(problem: Problem, said: str, revealed: set[int], text: str) -> tuple[int, int]:
    """Return how many facts a reply states right and how many it states, in sentences or as a bare number."""
    sentences = [sentence for sentence in split_sentences(text) if numbers(sentence)]
    pairs = [(sentence, fact) for sentence in sentences for fact in problem.facts
             if words(fact) <= words(sentence)]
    if pairs:
        return sum(states(fact, sentence) for sentence, fact in pairs), len(pairs)
    asked = asked_fact(problem, said, revealed)
    expected = numbers(problem.facts[asked]) if asked is not None else []
    if not sentences or not expected or objection(problem, said):
        return 0, 0
    return int(numbers(text)[-1] in expected), 1                            # a slip put right counts as right


def style_measures(problem: Problem | None, context: list[dict],
                   reply: str) -> dict[str, tuple[float, float]]:
    """Return (count, out of) of every measure for one user reply in a context; a measure that does not
    apply is left out.
    """
    said = context[-1]["content"] if context else ""
    text, left = split_leave(reply)
    earlier = {m["content"].lower() for m in context if m["role"] == "user"}
    found = {"three words or fewer": (len(reply.split()) <= 3, 1),
             "asks something": ("?" in reply, 1),
             "thanks": ("thank" in reply.lower(), 1),
             "leaves": (left is not None, 1),
             "repeats itself": (reply.lower() in earlier, 1),
             "speaks as the assistant": ("####" in reply or SUM.search(reply) is not None, 1)}
    if problem is None:
        return found
    revealed = revealed_facts(problem, context)
    now = revealed_facts(problem, [*context, {"role": "user", "content": text}])
    found["facts revealed a reply"] = (len(now - revealed), 1)
    right, stated = stated_facts(problem, said, revealed, text)
    if stated:
        found["facts stated right"] = (right, stated)
    if context and objection(problem, said):
        yes = re.search(r"\b(yes|right|ok|correct)\b", text.lower())
        no = re.search(r"\b(no|not|wrong)\b", text.lower())
        found[AGREES] = (yes is not None and no is None, 1)
    return found


def opening(chat: Chat, log: dict, m: int) -> list[int]:
    """Return what a simulator has read before it says message `m` of a log."""
    return chat.render(simulator_messages({**log, "messages": log["messages"][:m]}))[0]


def sampled_replies(simulator: Transformer, chat: Chat, logs: list[dict], places: list[tuple[int, int]],
                    seed: int, max_new_tokens: int, batch: int = 256) -> list[str]:
    """Return what a simulator says at message `m` of log `l` instead of the human, for every (l, m) in
    `places`.
    """
    replies = []
    for i in range(0, len(places), batch):
        part = places[i:i + batch]
        openings = [opening(chat, logs[l], m) for l, m in part]
        keys = [draw_key(seed, "report card", l, m) for l, m in part]
        replies += map(chat.text, Engine(simulator, chat, openings, keys, max_new_tokens).reply())
    return replies


@torch.no_grad()
def model_nll(simulator: Transformer, chat: Chat, logs: list[dict],
             batch: int = 32) -> list[tuple[float, float]]:
    """Return for every log the negative log-likelihood of its human tokens, in nats, and their number."""
    room, values = simulator.config.max_position_embeddings, []
    for i in range(0, len(logs), batch):
        examples = [chat.render(simulator_messages(log)) for log in logs[i:i + batch]]
        tokens, mask = pad_examples([(ids[:room], m[:room]) for ids, m in examples], simulator.device)
        nll = -token_logprobs(simulator, tokens, mask).sum(1)
        values += zip(nll.tolist(), mask.sum(1).tolist())
    return values


def script_nll(script: Callable, problem: Problem, log: dict, chat: Chat) -> tuple[float, float]:
    """Return the same of the script that wrote the log: the floor that no simulator can go below on
    average.
    """
    nll = tokens = 0.0
    for m in range(0, len(log["messages"]), 2):
        text = log["messages"][m]["content"]
        nll -= math.log(dict(script(problem, log["messages"][:m]))[text])
        tokens += len(chat.encode(text)) + 1
    return nll, tokens


def bootstrap(counts, seed: int, draws: int = 1000) -> list[float]:
    """Return sum of counts over sum of totals for (dialogues, 2) pairs, with its 95 % interval over
    resampled dialogues.
    """
    counts = np.asarray(counts, dtype=float)
    rows = np.random.default_rng(seed).integers(len(counts), size=(draws, len(counts)))
    sums = counts[rows].sum(1)
    ratios = sums[:, 0] / np.maximum(sums[:, 1], 1e-12)
    return [round(float(v), 4)
            for v in (counts[:, 0].sum() / counts[:, 1].sum(), *np.percentile(ratios, [2.5, 97.5]))]


def problem_of(log: dict, id: int) -> Problem | None:
    """Return a log's goal as a problem whose answer nobody knows, None if it is not on record."""
    if not (log.get("goal") or "").strip():
        return None
    *facts, ask = split_sentences(log["goal"])
    return Problem(id, log["goal"], tuple(facts), ask, solution="", answer="")


def measured_replies(logs: list[dict], places: list[tuple[int, int]], simulators: dict[str, Transformer],
                     chat: Chat, *, seed: int, max_new_tokens: int) -> dict[str, dict[str, np.ndarray]]:
    """Return {measure: {speaker: counts (logs, 2)}} of what every speaker says at the same places of the
    logs.
    """
    replies = {"human": [logs[l]["messages"][m]["content"] for l, m in places]}
    for name, simulator in simulators.items():
        replies[name] = sampled_replies(simulator, chat, logs, places, seed, max_new_tokens)
    problems, counts = [problem_of(log, i) for i, log in enumerate(logs)], {}
    for name, texts in replies.items():
        for (l, m), text in zip(places, texts):
            for measure, found in style_measures(problems[l], logs[l]["messages"][:m], text).items():
                counts.setdefault(measure, {}).setdefault(name, np.zeros((len(logs), 2)))[l] += found
    return counts


def report_card(logs: list[dict], simulators: dict[str, Transformer], chat: Chat, *, seed: int,
                max_new_tokens: int, probes: list[dict] = (),
                script: Callable | None = None) -> dict[str, dict[str, list[float]]]:
    """Compare simulators with the human of held-out logs; `script` is who wrote them, if it was one.

    Every speaker replies in the same contexts: before each of the human's messages, as long as the context
    leaves every simulator room for a reply. `probes` are logs that end in a planted mistake and the human's
    reply to it; without them, agreement is measured on mistakes in the logs themselves. Return
    {measure: {speaker: [value, low, high]}} with 95 % bootstrap intervals over dialogues.

    Raises: ValueError if no context leaves room for a reply.
    """
    nll = {}
    if script:
        nll["human"] = [script_nll(script, problem_of(log, i), log, chat) for i, log in enumerate(logs)]
    nll |= {name: model_nll(simulator, chat, logs) for name, simulator in simulators.items()}
    room = min(s.config.max_position_embeddings for s in simulators.values()) - max_new_tokens
    places = [(l, m) for l, log in enumerate(logs) for m in range(0, len(log["messages"]), 2)
              if len(opening(chat, log, m)) <= room]
    if not places:
        raise ValueError(f"no held-out dialogue leaves room for a reply of {max_new_tokens} tokens")
    counts = {NLL: nll} | measured_replies(logs, places, simulators, chat, seed=seed,
                                           max_new_tokens=max_new_tokens)
    last = [(l, len(log["messages"]) - 1) for l, log in enumerate(probes)
            if len(opening(chat, log, len(log["messages"]) - 1)) <= room]
    if last:
        counts[AGREES] = measured_replies(probes, last, simulators, chat, seed=seed,
                                          max_new_tokens=max_new_tokens)[AGREES]
    return {measure: {name: bootstrap(values, seed) for name, values in row.items()}
            for measure, row in counts.items()}


def print_report_card(card: dict) -> None:
    speakers = ("human", "naive", "calibrated")
    print(f"{'report card':40s}" + "".join(f"{speaker:>22s}" for speaker in speakers))
    for measure, row in card.items():
        cells = [f"{row[s][0]:.2f} [{row[s][1]:.2f}, {row[s][2]:.2f}]" if s in row else "-" for s in speakers]
        print(f"{measure:40s}" + "".join(f"{cell:>22s}" for cell in cells))


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"align_sim.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrate a simulator on human dialogues.",
                                     allow_abbrev=False)
    parser.add_argument("--simulator",
                        help="folder of the naive simulator (default: train a tiny over-helpful one first)")
    parser.add_argument("--human-logs", help="JSONL of human dialogues (default: the scripted human's)")
    parser.add_argument("--out",
                        help="folder for the calibrated simulator, which must not exist (default: not saved)")
    parser.add_argument("--steps", type=int, default=CALIBRATION_STEPS,
                        help=f"calibration steps (default: {CALIBRATION_STEPS})")
    parser.add_argument("--batch", type=int, default=SFT_BATCH,
                        help=f"dialogues a step (default: {SFT_BATCH})")
    parser.add_argument("--lr", type=float, default=SFT_LR, help=f"largest learning rate (default: {SFT_LR})")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    parser.error = fail
    args = parser.parse_args()
    try:
        if args.steps < 1 or args.batch < 1 or args.seed < 0 or not 0 < args.lr < math.inf:
            raise ValueError("--steps and --batch must be at least 1, --seed at least 0, --lr above 0")
        if args.out and Path(args.out).exists():
            raise ValueError(f"{args.out} exists: choose another --out")
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        chat = load_chat(args.simulator) if args.simulator else tiny_chat()
        naive = load_model(args.simulator) if args.simulator else None
        problems = generate_problems("train", 8000, args.seed)
        validation = generate_problems("validation", 300, args.seed)
        if args.human_logs:
            logs, held_out = split_logs(read_logs(args.human_logs), args.seed)
            probes, script = [], None
        else:
            logs, held_out = write_logs(problems, human, args.seed), write_logs(validation, human, args.seed)
            probes, script = write_probes(validation, held_out, human, args.seed), human
        if naive is None:
            print(f"training a naive simulator first, {SFT_STEPS // 2} steps", flush=True)
            naive, _ = naive_simulator(chat, problems, steps=SFT_STEPS // 2, batch=SFT_BATCH, lr=SFT_LR,
                                       seed=args.seed)
        calibrated = copy.deepcopy(naive)
        losses = calibrate(calibrated, chat, logs, steps=args.steps, batch=args.batch, lr=args.lr,
                           seed=args.seed)
        print(f"calibrated on {len(logs)} dialogues: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")
        if args.out:
            save_model(calibrated, args.out)
            save_chat(chat, args.out)
        card = report_card(held_out, {"naive": naive, "calibrated": calibrated}, chat, seed=args.seed,
                           max_new_tokens=MAX_NEW_TOKENS, probes=probes, script=script)
    except (ValueError, FloatingPointError, OSError) as error:
        fail(str(error))
    print_report_card(card)


if __name__ == "__main__":
    main()
