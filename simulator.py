"""Who plays the user: a script, a language model, or you at the keyboard.

A user has two methods. `begin(goals, draw_keys)` starts a batch of dialogues: it hands over what the users
want and know, never the answers. `reply(rows, dialogues)` returns the next message in some of the dialogues
and, where a dialogue ends with it, why.

1. `ScriptedUser` draws from an explicit distribution. The task's *human* script stands for real people: it
   writes the logs and it is the final test.
2. `ModelUser` is a language model with flipped roles: its own turns are the user's, and the hidden goal is
   the first message that it reads. As it comes it is the *naive* simulator, over-helpful and agreeable;
   fine-tuned on human logs it is the *calibrated* one (align_sim.py).
3. `KeyboardUser` is you.

Paper: user simulator, with its goal in the prompt (arXiv 2605.26403).

Run `python simulator.py` to see what a user may say in the middle of a dialogue.
"""

import random
import re
import sys

import torch

from chat import Chat
from config import Parser, command
from engine import Engine
from model import Transformer
from sampling import uniform
from tasks import LEAVE, Dialogue, Script, find_task, generate_problems

# a language model may write the leaving phrase like a sentence, or quote it
SPELLED_LEAVE = re.compile("[\"“*]{0,3}" + LEAVE.replace("'", "['’]"), re.IGNORECASE)
Reply = tuple[str, str | None]          # a message, and "left", "truncated", "failed" or None: why it ends


def split_leave(text: str) -> Reply:
    """Separate the leaving phrase from what was said before it."""
    before, *after = SPELLED_LEAVE.split(text, maxsplit=1)
    return before.strip(), "left" if after else None


def goal_prompt(goal: str | None) -> str:
    return goal or "(no goal on record)"


def simulator_messages(log: dict) -> list[dict]:
    """Return a logged dialogue as the simulator reads it: the goal first, then the roles flipped."""
    flipped = {"user": "assistant", "assistant": "user"}
    return [{"role": "user", "content": goal_prompt(log.get("goal"))},
            *({"role": flipped[m["role"]], "content": m["content"]} for m in log["messages"])]


class ScriptedUser:
    """A user that draws from a script's distribution."""

    def __init__(self, script: Script):
        self.script = script

    def begin(self, goals: list[str], draw_keys: list[int]) -> None:
        self.goals, self.draw_keys = goals, draw_keys

    def reply(self, rows: list[int], dialogues: list[Dialogue]) -> list[Reply]:
        """Return each row's next message, and why its dialogue ends with it, or None."""
        draw_keys, positions = [self.draw_keys[row] for row in rows], [len(dialogues[row]) for row in rows]
        u = uniform(torch.tensor(draw_keys, dtype=torch.long), torch.tensor(positions, dtype=torch.long))
        replies = []
        for row, target in zip(rows, u.tolist()):
            for text, probability in self.script(self.goals[row], dialogues[row]):
                target -= probability
                if target < 0:
                    break
            replies.append(split_leave(text))
        return replies


class ModelUser:
    """A language model that plays the user."""

    def __init__(self, model: Transformer, chat: Chat, max_new_tokens: int):
        self.model, self.chat, self.max_new_tokens = model, chat, max_new_tokens

    def begin(self, goals: list[str], draw_keys: list[int]) -> None:
        openings = [self.chat.open(goal_prompt(goal)) for goal in goals]
        self.engine = Engine(self.model, self.chat, openings, draw_keys, self.max_new_tokens)

    def reply(self, rows: list[int], dialogues: list[Dialogue]) -> list[Reply]:
        """As `ScriptedUser.reply`; a dialogue that no longer fits the simulator's context is "truncated"."""
        engine, fits = self.engine, []
        for row in rows:
            if dialogues[row]:
                engine.feed(row, self.chat.extend(engine.tokens[row][-1], dialogues[row][-1]["content"]))
            if engine.has_room(row):
                fits.append(row)
        engine.keep(fits)
        said = dict(zip(fits, engine.reply())) if fits else {}
        return [split_leave(self.chat.text(said[row])) if row in said else ("", "truncated") for row in rows]


class KeyboardUser:
    """You. An empty line or the end of input leaves the dialogue."""

    def begin(self, goals: list[str], draw_keys: list[int]) -> None:
        print(f"You want help with this, and the assistant cannot see it:\n  {goals[0]}")

    def reply(self, rows: list[int], dialogues: list[Dialogue]) -> list[Reply]:
        if dialogues[0]:
            print(f"assistant: {dialogues[0][-1]['content']}")
        print("you:       ", end="", flush=True)
        text = sys.stdin.readline().strip()
        return [split_leave(text) if text else ("", "left")]


@command
def main() -> None:
    parser = Parser("See what a user may say in the middle of a dialogue.")
    parser.add_fields("task", "seed")
    args = parser.parse_args()
    task, rng, dialogue = find_task(args.task), random.Random(args.seed), []
    problem = generate_problems(task, "test", 1, args.seed)[0]
    print(f"goal: {problem.goal}\n(the human opens)")
    for _ in range(4):
        outcomes = task.human(problem.goal, dialogue)
        for text, probability in outcomes:
            print(f"   {probability:.2f}  {text}")
        dialogue.append({"role": "user", "content": max(outcomes, key=lambda outcome: outcome[1])[0]})
        dialogue.append({"role": "assistant", "content": task.assistant(problem, dialogue, rng)})
        print(f"assistant: {dialogue[-1]['content']}")


if __name__ == "__main__":
    main()
