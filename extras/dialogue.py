"""One dialogue as the update sees it: token by token, what was said by whom, and what is trained.

`python rollout.py --policy out/policy --tokens` prints it; with a file behind `--tokens` it writes the CSV
that `python -m extras.plot` draws.
"""

from itertools import groupby
from pathlib import Path

import torch

from chat import Chat
from config import UserError
from extras.plot import write_csv
from grpo import advantages
from rollout import Trajectory


def speakers(trajectory: Trajectory, chat: Chat) -> list[str]:
    """Return who said each token: the assistant its actions; between them stand the user's text and, around
    it, what the chat format adds, an end-of-turn included where a reply was cut.
    """
    found = []
    for action, run in groupby(zip(trajectory.action_mask, trajectory.tokens), key=lambda pair: pair[0]):
        length = len(list(run))
        if action:
            found += ["assistant"] * length
            continue
        cut = bool(found) and trajectory.tokens[len(found) - 1] != chat.end
        before = cut + len(chat.mid) if found else len(chat.head)
        found += ["format"] * before + ["user"] * (length - before - len(chat.post))
        found += ["format"] * len(chat.post)
    return found


def token_rows(group: list[Trajectory], chat: Chat) -> list[dict]:
    """Return a row per token of a group's first dialogue, as the update sees it: only actions are trained,
    and every one of them has the dialogue's advantage.
    """
    advantage, first = float(advantages(torch.tensor([[t.reward for t in group]]))[0, 0]), group[0]
    rows, turn, before, said_by = [], 0, 0, speakers(first, chat)
    for i, (token, action, logprob) in enumerate(zip(first.tokens, first.action_mask, first.logprobs)):
        turn, before = turn + (action > before), action                       # a turn begins with a reply
        rows.append({"turn": turn, "speaker": said_by[i], "token": token, "text": chat.decode([token]),
                     "action": action, "logprob": f"{logprob:.2f}" if action else "",
                     "advantage": f"{advantage:+.2f}" if action else ""})
    return rows


def print_tokens(group: list[Trajectory], chat: Chat, path: str) -> None:
    """Print the rows, or write them to a CSV file if `path` is not "-"."""
    if path != "-":
        try:
            write_csv(Path(path), token_rows(group, chat))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        return
    print(f"[{group[0].problem.goal}]  rewards of the group: {[t.reward for t in group]}")
    line = "{turn:>4} {speaker:>9} {token:>6}  {text:20} {action:>6} {logprob:>7} {advantage:>9}"
    names = ("turn", "speaker", "token", "text", "action", "logprob", "advantage")
    for row in [dict(zip(names, names)), *token_rows(group, chat)]:
        print(line.format(**row))
