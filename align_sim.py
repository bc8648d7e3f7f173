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

from chat import Chat, is_embedded, tiny_chat
from logs import read_logs, split_logs, write_logs, write_probes
from model import Transformer, autocast, tiny_config, token_logprobs, trainable
from rollout import MAX_NEW_TOKENS
from sampling import Engine, draw_key
from simulator import (NAIVE_USER, SUM, asked_fact, human, numbers, objection, overhelpful, revealed_facts,
                       simulator_messages, split_leave, states, words)
from tasks import Problem, generate_problems, split_sentences
from weights import load_speaker, save_speaker

SFT_STEPS, CALIBRATION_STEPS, SFT_BATCH, SFT_LR = 1600, 2000, 32, 3e-3         # the tiny preset's
NLL, AGREES = "NLL of the human's words (nats a token)", "agrees with a wrong sum or fact"     # of the card
OWN_STEPS, OWN_BATCH, OWN_LR = 100, 8, 2e-5                                    # for a simulator of one's own
Example = tuple[list[int], list[int]]           # ids and mask of a dialogue, as `Chat.render` returns them


def pad_examples(examples: list[Example], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, (B, T) each, padded on the right."""
    T = max(len(ids) for ids, _ in examples)
    tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in examples], device=device)
    return tokens, torch.tensor([mask + [0] * (T - len(mask)) for _, mask in examples], device=device).bool()


@torch.no_grad()
def examples_nll(model: Transformer, examples: list[Example], batch: int) -> list[tuple[float, float]]:
    """Return for every example the negative log-likelihood of its masked tokens, in nats, and their
    number.
    """
    room, values = model.config.max_position_embeddings, []
    for i in range(0, len(examples), batch):
        tokens, mask = pad_examples([(ids[:room], m[:room]) for ids, m in examples[i:i + batch]],
                                    model.device)
        nll = -token_logprobs(model, tokens, mask).sum(1)
        values += zip(nll.tolist(), mask.sum(1).tolist())
    return values


def mean_nll(model: Transformer, examples: list[Example], batch: int) -> float:
    """Return the negative log-likelihood a masked token, infinite if there is none."""
    nlls, counts = zip(*examples_nll(model, examples, batch)) if examples else ((), ())
    return sum(nlls) / sum(counts) if sum(counts) else math.inf


def sft(model: Transformer, examples: list[Example], *, steps: int, batch: int, lr: float, seed: int,
        micro_batch: int = 16, precision: str = "fp32", validation: list[Example] = (), title: str = "sft"
        ) -> list[float]:
    """Fine-tune on the masked tokens and return the loss of every step, in nats a token.

    One normaliser a step, its number of masked tokens, so the split into length-sorted micro-batches, which
    spares padding, does not change the gradient. The learning rate warms up over 20 steps and decays to a
    tenth by a cosine. With `validation` examples, their loss is measured every tenth of the steps; training
    stops when it has not reached a new minimum three times in a row, and the weights of the minimum are
    restored.

    Raises: FloatingPointError if the loss is not finite; ValueError if there is nothing to learn.
    """
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples if any(mask[:room])]
    if not examples:
        raise ValueError(f"{title}: no dialogue has a token to learn within {room} tokens")
    optimiser = torch.optim.AdamW(trainable(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    rng, order, losses = random.Random(seed), [], []
    lowest, best, worse = mean_nll(model, validation, micro_batch), [], 0
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
            with autocast(model.device, precision):
                loss = -token_logprobs(model, tokens, mask).sum() / normaliser
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise FloatingPointError(f"{title}: the loss is {total} at step {step + 1}")
        torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
        optimiser.step()
        losses.append(total)
        if validation and (step + 1) % max(1, steps // 10) == 0:
            nll, worse = mean_nll(model, validation, micro_batch), worse + 1
            if nll < lowest:
                lowest, best, worse = nll, [parameter.detach().clone() for parameter in trainable(model)], 0
            if worse == 3:
                break
    for parameter, value in zip(trainable(model), best):
        parameter.data.copy_(value)
    return losses


def naive_simulator(chat: Chat, problems: list[Problem], *, steps: int, batch: int, lr: float, seed: int,
                    device: str = "cpu") -> tuple[Transformer, list[float]]:
    """Return a tiny simulator that was fine-tuned on over-helpful users, as prompted language models are,
    and the losses.
    """
    model = Transformer(tiny_config(vocab_size=chat.vocab_size),
                        draw_key(seed, "simulator weights")).to(device)
    examples = [chat.render(simulator_messages(log)) for log in write_logs(problems, overhelpful, seed)]
    return model, sft(model, examples, steps=steps, batch=batch, lr=lr, seed=seed, title="naive simulator")


def calibrate(simulator: Transformer, chat: Chat, logs: list[dict], *, steps: int, batch: int, lr: float,
              seed: int, micro_batch: int = 16, precision: str = "fp32",
              stop_early: bool = False) -> list[float]:
    """Fine-tune a simulator in place on what people said in `logs`; return the losses.

    Real people's dialogues are few and are soon learned by heart: with `stop_early` a sixth of them is not
    trained on but says when to stop (not the held-out ones: those are for the report card).
    """
    examples = [chat.render(simulator_messages(log)) for log in logs]
    sixth = max(1, len(logs) // 6) if stop_early and len(logs) > 1 else 0
    return sft(simulator, examples[sixth:], steps=steps, batch=batch, lr=lr, seed=seed,
               micro_batch=micro_batch, precision=precision, validation=examples[:sixth], title="calibration")


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
                    seed: int, max_new_tokens: int, batch: int = 64) -> list[str]:
    """Return what a simulator says at message `m` of log `l` instead of the human, for every (l, m) in
    `places`, in the order of the logs. Every log is read once: a sampled reply is taken back, and the human's
    own is read instead.
    """
    turns, replies = {}, {}
    for l, m in places:
        turns.setdefault(l, []).append(m)
    for i in range(0, len(turns), batch):
        part = list(turns)[i:i + batch]
        engine = Engine(simulator, chat, [opening(chat, logs[l], turns[l][0]) for l in part], [0] * len(part),
                        max_new_tokens)
        for k in range(max(len(turns[l]) for l in part)):
            rows = [row for row, l in enumerate(part) if k < len(turns[l])]
            engine.keep(rows)
            here = [(part[row], turns[part[row]][k]) for row in rows]
            keys = [draw_key(seed, "report card", l, m) for l, m in here]
            engine.keys = torch.tensor(keys, device=simulator.device)
            read = [len(engine.tokens[row]) for row in rows]
            replies |= {place: chat.text(ids) for place, ids in zip(here, engine.reply())}
            for row, (l, m), length in zip(rows, here, read):
                engine.take_back(row, length)
                if k + 1 < len(turns[l]):
                    engine.feed(row, opening(chat, logs[l], turns[l][k + 1])[length:])
    return [replies[place] for place in places]


def model_nll(simulator: Transformer, chat: Chat, logs: list[dict]) -> list[tuple[float, float]]:
    """Return for every log the negative log-likelihood of its human tokens, in nats, and their number."""
    return examples_nll(simulator, [chat.render(simulator_messages(log)) for log in logs], batch=32)


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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calibrate a simulator on human dialogues.",
                                     allow_abbrev=False)
    parser.add_argument("--simulator", help="naive simulator: folder, GGUF file or hub id "
                                            "(default: train a tiny over-helpful one first)")
    parser.add_argument("--human-logs", help="JSONL of human dialogues (default: the scripted human's)")
    parser.add_argument("--out",
                        help="folder for the calibrated simulator, which must not exist (default: not saved)")
    parser.add_argument("--steps", type=int,
                        help=f"largest number of steps (default: {CALIBRATION_STEPS} for the "
                                                  f"embedded simulator, {OWN_STEPS} for another)")
    parser.add_argument("--batch", type=int, help=f"dialogues a step (default: {SFT_BATCH}, {OWN_BATCH})")
    parser.add_argument("--lr", type=float, help=f"largest learning rate (default: {SFT_LR}, {OWN_LR})")
    parser.add_argument("--micro-batch", type=int, default=4,
                        help="dialogues a forward and backward pass (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS,
                        help=f"tokens a reply may have on the report card (default: {MAX_NEW_TOKENS})")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                        help="bf16 multiplies matrices in bf16 (default: fp32)")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    parser.error = fail
    args = parser.parse_args()
    embedded = not args.simulator or is_embedded(args.simulator)
    for name, default in zip(("steps", "batch", "lr"), (CALIBRATION_STEPS, SFT_BATCH, SFT_LR) if embedded
                             else (OWN_STEPS, OWN_BATCH, OWN_LR)):
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
    if min(args.steps, args.batch, args.micro_batch, args.max_new_tokens) < 1 or args.seed < 0 \
            or not 0 < args.lr < math.inf:
        fail("--seed must be at least 0, --lr above 0, the other numbers at least 1")
    if args.out and Path(args.out).exists():
        fail(f"{args.out} exists: choose another --out")
    return args


def main() -> None:
    args = parse_args()
    try:
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        naive, chat = load_speaker(args.simulator, NAIVE_USER) if args.simulator else (None, tiny_chat())
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
                           seed=args.seed,
                           micro_batch=args.micro_batch, precision=args.precision, stop_early=script is None)
        print(f"calibrated on {len(logs)} dialogues, {len(losses)} steps: "
              f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token", flush=True)
        if args.out:
            save_speaker(Path(args.out), calibrated, chat)
        card = report_card(held_out, {"naive": naive, "calibrated": calibrated}, chat, seed=args.seed,
                           max_new_tokens=args.max_new_tokens, probes=probes, script=script)
    except (ValueError, FloatingPointError, OSError) as error:
        fail(str(error))
    print_report_card(card)


if __name__ == "__main__":
    main()
