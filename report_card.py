"""The report card: what a simulator does, beside what people did in the same places.

Every speaker replies in the place of each of the human's messages in held-out dialogues. Each reply is
measured: is it short, polite, a repetition, does it leave, and what the task adds (`Task.measures`). The
human's own words are scored by each simulator. A policy can be no better than the user it learned from: read
this card before training.

Run `python report_card.py` for the two scripts: what tells the human from the over-helpful user.
"""

import math

import numpy as np
import torch

from chat import Chat
from config import Parser, UserError, command
from engine import Engine
from logs import write_logs
from model import Transformer
from sampling import draw_key
from sft import examples_nll
from simulator import simulator_messages, split_leave
from tasks import Dialogue, Script, Task, find_task, generate_problems

PLACES = 8                      # messages of the human in a dialogue, the first, that every speaker replaces
NLL = "NLL of the human's words (nats per token)"
Counts = tuple[float, float]                                    # how many, out of how many
Place = tuple[int, int]                                         # message m of log l


def measure(task: Task, goal: str | None, context: Dialogue, reply: str) -> dict[str, Counts]:
    """Return the counts of every line for one user reply in a context."""
    text, left = split_leave(reply)
    earlier = {message["content"].lower() for message in context if message["role"] == "user"}
    return {"three words or fewer": (len(reply.split()) <= 3, 1),
            "asks something": ("?" in reply, 1),
            "thanks": ("thank" in reply.lower(), 1),
            "leaves": (left is not None, 1),
            "repeats itself": (reply.lower() in earlier, 1),
            **task.measures(goal, context, text)}


def read_before(chat: Chat, log: dict, m: int) -> list[int]:
    """Return what a simulator has read before it says message `m` of a log."""
    return chat.render(simulator_messages({**log, "messages": log["messages"][:m]}))[0]


def sampled_replies(simulator: Transformer, chat: Chat, logs: list[dict], places: list[Place], seed: int,
                    max_new_tokens: int, batch: int = 64) -> list[str]:
    """Return what a simulator says instead of the human at each of `places`, in the order of the logs.

    Every log is read once: a sampled reply is taken back, and the human's own is read instead.
    """
    messages_at, replies = {}, {}
    for l, m in places:
        messages_at.setdefault(l, []).append(m)
    for i in range(0, len(messages_at), batch):
        part = list(messages_at)[i:i + batch]
        openings = [read_before(chat, logs[l], messages_at[l][0]) for l in part]
        engine = Engine(simulator, chat, openings, [0] * len(part), max_new_tokens)
        for k in range(max(len(messages_at[l]) for l in part)):
            rows = [row for row, l in enumerate(part) if k < len(messages_at[l])]
            engine.keep(rows)
            here = [(part[row], messages_at[part[row]][k]) for row in rows]
            draw_keys = [draw_key(seed, "report card", l, m) for l, m in here]
            engine.draw_keys = torch.tensor(draw_keys, device=simulator.device)
            read = [len(engine.tokens[row]) for row in rows]
            replies |= {place: chat.text(ids) for place, ids in zip(here, engine.reply())}
            for row, (l, m), length in zip(rows, here, read):
                engine.take_back(row, length)
                if k + 1 < len(messages_at[l]):
                    engine.feed(row, read_before(chat, logs[l], messages_at[l][k + 1])[length:])
    return [replies[place] for place in places]


def model_nll(simulator: Transformer, chat: Chat, logs: list[dict]) -> list[Counts]:
    """Return the negative log-likelihood of each log's human tokens, in nats, and their number."""
    return examples_nll(simulator, [chat.render(simulator_messages(log)) for log in logs])


def script_nll(user: Script, log: dict, chat: Chat) -> Counts:
    """Return the same under the script that wrote the log; on average no simulator can be below it."""
    nll = tokens = 0.0
    for m in range(0, len(log["messages"]), 2):
        text = log["messages"][m]["content"]
        nll -= math.log(dict(user(log["goal"], log["messages"][:m]))[text])
        tokens += len(chat.encode(text)) + 1
    return nll, tokens


def bootstrap(counts: list[Counts], seed: int, draws: int = 1000) -> list[float]:
    """Return the share of times that something happened, with its 95 % interval over resampled dialogues;
    counts[i] says how often it happened in dialogue i, and how often it could have.
    """
    counts = np.asarray(counts, dtype=float)                                                # (dialogues, 2)
    rows = np.random.default_rng(seed).integers(len(counts), size=(draws, len(counts)))
    sums = counts[rows].sum(1)
    ratios = sums[:, 0] / np.maximum(sums[:, 1], 1e-12)
    return [round(float(v), 4)
            for v in (counts[:, 0].sum() / counts[:, 1].sum(), *np.percentile(ratios, [2.5, 97.5]))]


def measured_replies(task: Task, logs: list[dict], places: list[Place], simulators: dict[str, Transformer],
                     chat: Chat, *, seed: int, max_new_tokens: int) -> dict[str, dict[str, np.ndarray]]:
    """Return {line: {speaker: counts (logs, 2)}} of what every speaker says at the same places."""
    replies = {"human": [logs[l]["messages"][m]["content"] for l, m in places]}
    for name, simulator in simulators.items():
        replies[name] = sampled_replies(simulator, chat, logs, places, seed, max_new_tokens)
    counts = {}
    for name, said in replies.items():
        for (l, m), reply in zip(places, said):
            goal = (logs[l].get("goal") or "").strip() or None                   # None: it is not on record
            found = measure(task, goal, logs[l]["messages"][:m], reply)
            for line, count in found.items():
                counts.setdefault(line, {}).setdefault(name, np.zeros((len(logs), 2)))[l] += count
    return counts


def report_card(task: Task, logs: list[dict], simulators: dict[str, Transformer], chat: Chat, *, seed: int,
                max_new_tokens: int, probes: list[dict] = (),
                scripted: bool = False) -> dict[str, dict[str, list[float]]]:
    """Compare simulators with the human of held-out logs, who may be the task's script.

    Every speaker replies in the same contexts: before each of the human's first messages, while the context
    leaves every simulator room for a reply. `probes` end in a planted mistake and the human's reply to it;
    without them, agreement is measured on mistakes in the logs themselves. Return {line: {speaker: [value,
    low, high]}} with 95 % bootstrap intervals over dialogues.

    Raises: UserError if no context leaves room for a reply.
    """
    nll = {"human": [script_nll(task.human, log, chat) for log in logs]} if scripted else {}
    nll |= {name: model_nll(simulator, chat, logs) for name, simulator in simulators.items()}
    room = min(s.config.max_position_embeddings for s in simulators.values()) - max_new_tokens
    places = [(l, m) for l, log in enumerate(logs) for m in range(0, len(log["messages"]), 2)[:PLACES]
              if len(read_before(chat, log, m)) <= room]
    if not places:
        raise UserError(f"no held-out dialogue leaves room for a reply of {max_new_tokens} tokens")
    options = dict(seed=seed, max_new_tokens=max_new_tokens)
    counts = {NLL: nll} | measured_replies(task, logs, places, simulators, chat, **options)
    last = [(l, len(log["messages"]) - 1) for l, log in enumerate(probes)
            if len(read_before(chat, log, len(log["messages"]) - 1)) <= room]
    if last:
        counts[task.probed] = measured_replies(task, probes, last, simulators, chat, **options)[task.probed]
    return {line: {name: bootstrap(values, seed) for name, values in row.items()}
            for line, row in counts.items()}


def print_report_card(card: dict) -> None:
    speakers = [name for name in ("human", "naive", "calibrated", "overhelpful")
                if any(name in row for row in card.values())]
    print(f"{'report card':42s}" + "".join(f"{speaker:>22s}" for speaker in speakers))
    for line, row in card.items():
        cells = [f"{row[s][0]:.2f} [{row[s][1]:.2f}, {row[s][2]:.2f}]" if s in row else "-" for s in speakers]
        print(f"{line:42s}" + "".join(f"{cell:>22s}" for cell in cells))


@command
def main() -> None:
    parser = Parser("Compare the human with the over-helpful user, line by line.")
    parser.add_fields("task", "facts", "seed")
    args = parser.parse_args()
    task, counts = find_task(args.task), {}
    problems = generate_problems(task, "validation", 200, args.seed, args.facts)
    for speaker in ("human", "overhelpful"):
        for log in write_logs(task, problems, speaker, args.seed, "validation"):
            for m in range(0, len(log["messages"]), 2):
                found = measure(task, log["goal"], log["messages"][:m], log["messages"][m]["content"])
                for line, count in found.items():
                    counts.setdefault(line, {}).setdefault(speaker, []).append(count)
    print_report_card({line: {name: bootstrap(values, args.seed) for name, values in row.items()}
                       for line, row in counts.items()})


if __name__ == "__main__":
    main()
