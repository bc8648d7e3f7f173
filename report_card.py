"""The report card: what a simulator does, beside what people did in the same places.

Every speaker replies before each of the human's messages in held-out dialogues; replies are measured (short,
polite, leaving, leaking or misstating facts, agreeing with mistakes), and the human's own words are scored by
each simulator. A policy can be no better than the user it learned from: read this before training.

Run `python report_card.py` for the two scripts: what tells the human from the over-helpful user.
"""

import math
import re
from collections.abc import Callable

import numpy as np
import torch

from chat import Chat
from engine import Engine
from logs import write_logs
from model import Transformer
from sampling import draw_key
from sft import examples_nll
from simulator import (SUM, asked_fact, human, numbers, objection, overhelpful, revealed_facts,
                       simulator_messages, split_leave, states, words)
from tasks import Problem, generate_problems, split_sentences

PLACES = 8                      # messages of the human in a dialogue, the first, that every speaker replaces
NLL, AGREES = "NLL of the human's words (nats a token)", "agrees with a wrong sum or fact"


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
    return examples_nll(simulator, [chat.render(simulator_messages(log)) for log in logs])


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

    Every speaker replies in the same contexts: before each of the human's first messages, while the context
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
    places = [(l, m) for l, log in enumerate(logs) for m in range(0, len(log["messages"]), 2)[:PLACES]
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


def main() -> None:
    problems, rows = generate_problems("validation", 200), {}
    for script in (human, overhelpful):
        for problem, log in zip(problems, write_logs(problems, script, seed=0)):
            for m in range(0, len(log["messages"]), 2):
                found = style_measures(problem, log["messages"][:m], log["messages"][m]["content"])
                for measure, counts in found.items():
                    rows.setdefault(measure, {}).setdefault(script.__name__, []).append(counts)
    print(f"{'':40s}{'human':>10s}{'overhelpful':>14s}")
    for measure, row in rows.items():
        shares = [sum(n for n, _ in row[name]) / sum(of for _, of in row[name])
                  for name in ("human", "overhelpful")]
        print(f"{measure:40s}{shares[0]:10.2f}{shares[1]:14.2f}")


if __name__ == "__main__":
    main()
