"""What a problem is, and what a task decides.

A *problem* is a hidden goal: what a user wants and knows. The policy does not see it and has to ask. The user
sees the goal alone; the answer is for the reward.

A *task* is one value, named TASK, in a file of its own, task_NAME.py, where `--task NAME` finds it: how
problems are made, who speaks about them, when a dialogue ends and what it earns. No other file knows what
the dialogues are about, so a new task is a new file and nothing else (docs/add_a_task.md).

The user reveals a goal bit by bit. The middle of this file keeps track of that for any task whose goals are
made of facts: which fact was asked for, which have been told.

Run `python tasks.py` to see problems; `--generate 1000 --facts 2 > easy.jsonl` writes some to a file.
"""

import importlib
import importlib.util
import json
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from config import Parser, UserError, command, number

# tenths of all possible problems
SPLITS = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}
LEAVE = "never mind, i'll do it myself"         # whoever says this ends the dialogue

Dialogue = list[dict]                           # {"role": "user" or "assistant", "content": text}, user first
Distribution = list[tuple[str, float]]          # what somebody may say next, with probabilities
Script = Callable[[str, Dialogue], Distribution]                       # of a goal and what was said so far
Equal = Callable[[str, str], bool]              # whether a given answer is the right one


class GradingError(Exception):
    """A check that comes to no verdict: the dialogue is dropped, not rewarded with 0."""


@dataclass(frozen=True)
class Problem:
    """One problem. Whoever plays the user is handed the goal and nothing else."""
    id: int             # position in its list: keys random draws
    goal: str           # what the user wants and knows
    answer: str         # what the reward asks for
    solution: str       # a reply that earns it


def texts(row: dict, *names: str) -> list[str]:
    """Return the texts of the named fields that hold one, or raise UserError if none does."""
    if not isinstance(row, dict):
        raise UserError(f"expected an object with {' or '.join(names)}, got {type(row).__name__}")
    found = [row[name].strip() for name in names if isinstance(row.get(name), str) and row[name].strip()]
    if not found:
        quoted, given = " or ".join(f"'{name}'" for name in names), [row.get(name) for name in names]
        raise UserError(f"{quoted} must be a text that is not empty, got {given!r:.60}")
    return found


def parse_row(row: dict, id: int, equal: Equal) -> Problem:
    """Return the problem of a row with the fields goal, answer and solution."""
    return Problem(id, *(texts(row, name)[0] for name in ("goal", "answer", "solution")))


def told_at_once(problem: Problem, rng: random.Random) -> Dialogue:
    """Return a dialogue in which the user tells everything and the assistant does it right."""
    return [{"role": "user", "content": problem.goal}, {"role": "assistant", "content": problem.solution}]


@dataclass(frozen=True)
class Task:
    """Everything that a task decides."""
    # problems
    make: Callable[[random.Random, int], dict]          # a row as files have it, whose user holds n facts
    sizes: dict[int, int]                   # {n facts: most problems per split}; the first n is the default
    # who speaks
    human: Script                           # stands for real people: writes the logs and is the final test
    overhelpful: Script                     # what prompted language models are like; the naive simulator
    assistant: Callable[[Problem, Dialogue, random.Random], str]        # what people talked to, in the logs
    # what language models are told
    policy_instruction: str
    simulator_instruction: str
    human_instruction: str                  # to one that stands for people, instead of the script
    # the dialogue
    horizon: int                            # assistant turns, H
    max_new_tokens: int                     # of a reply, in the tiny preset
    ends: Callable[[str], bool]             # whether this reply of the policy ends the dialogue
    reward: Callable[[Problem, Dialogue, Equal], float]                 # of a finished dialogue, 0 to 1
    parse: Callable[[dict, int, Equal], Problem] = parse_row            # a row and its id; raises UserError
    told_at_once: Callable[[Problem, random.Random], Dialogue] = told_at_once       # for the warm start
    # the report card: {line: (count, out of)} of a user's reply in a context, where the goal may be unknown;
    # a probe is a planted mistake of the assistant, or None where nothing can be planted yet
    measures: Callable[[str | None, Dialogue, str], dict] = lambda goal, context, reply: {}
    probe: Callable[[Problem, Dialogue, random.Random], str | None] = lambda problem, context, rng: None
    probed: str = ""                                                    # the line that probes measure
    equal: Equal = operator.eq              # of answers; extras/grader.py knows more than one spelling
    paper: dict[str, float] = field(default_factory=dict)               # the paper's score of each method
    score: str = "mean reward"              # what the score is, for the table


def task_names() -> list[str]:
    return sorted(path.stem.removeprefix("task_") for path in Path(__file__).parent.glob("task_*.py"))


def find_task(name: str) -> Task:
    """Return the task of task_NAME.py, or raise UserError if there is no such file."""
    if not re.fullmatch(r"\w+", name) or importlib.util.find_spec(f"task_{name}") is None:
        raise UserError(f"--task {name}: there is no task_{name}.py (there are: {', '.join(task_names())})")
    return importlib.import_module(f"task_{name}").TASK


# What a user has told ---------------------------------------------------------------------------------------

# \[...\], \(...\), $$...$$ and $...$; "$5 and $7" are prices: a space before the second $, a digit behind it
MATHS = re.compile(r"\\[\[(](?:(?!\\[\[\]()]).)*\\[\])]|\$\$[^$]+\$\$"
                   r"|(?<![\w\\$])\$(?=[^\s$])(?:\\.|[^$\\])*(?<=\S)\$(?!\d)", re.DOTALL)
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]\$)|(?<=[.!?]\\\]))\s+(?=[A-Z0-9\"'$(])")


def split_sentences(text: str) -> list[str]:
    """Cut a text after . ! or ? where white space and a capital, digit, quote or $ follow, never in maths."""
    text = text.strip()
    joined = MATHS.sub(lambda maths: re.sub(r"\s", "_", maths[0]), text)           # no white space, no cut
    cuts = [0, *(end.end() for end in SENTENCE_END.finditer(joined)), len(text)]
    return [text[start:end].strip() for start, end in pairwise(cuts) if text[start:end].strip()]


@lru_cache(maxsize=100_000)
def facts_of(goal: str) -> tuple[str, ...]:
    """Return the sentences of a goal but the last."""
    return tuple(split_sentences(goal)[:-1])


def question_of(goal: str) -> str:
    return split_sentences(goal)[-1]


def words(text: str) -> frozenset[str]:
    """Return the words of a text, lower case, without a trailing s."""
    return frozenset(word.rstrip("s") for word in re.findall(r"[a-z']+", text.lower()))


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)


@lru_cache(maxsize=100_000)
def telling_words(facts: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """Return for each fact the words that no other fact has."""
    return tuple(words(fact) - frozenset().union(*(words(other) for j, other in enumerate(facts) if j != i))
                 for i, fact in enumerate(facts))


def asked_fact(facts: tuple[str, ...], said: str, revealed: set[int]) -> int | None:
    """Return which fact an assistant's question is about, None if nothing is asked or nothing is left.

    It is the fact that shares most telling words with the question, an unrevealed one if several share as
    many. If no fact shares any, it is the next unrevealed one.
    """
    question = words(" ".join(sentence for sentence in split_sentences(said) if "?" in sentence))
    if not question:
        return None
    shared = [len(question & telling) for telling in telling_words(facts)]
    order = sorted(range(len(shared)), key=lambda i: (-shared[i], i in revealed, i))
    if order and shared[order[0]] > 0:
        return order[0]
    return next((i for i in order if i not in revealed), None)


def states(fact: str, text: str) -> bool:
    """Return whether a reply about a fact states it: all its numbers or, if it has none, its words."""
    wanted = numbers(fact)
    return set(wanted) <= set(numbers(text)) if wanted else words(fact) <= words(text)


def revealed_facts(facts: tuple[str, ...], dialogue: Dialogue) -> set[int]:
    """Return the facts that the user's messages have given away, by going through the dialogue once."""
    revealed = set()
    for i, message in enumerate(dialogue):
        if message["role"] == "user":
            text = message["content"]
            asked = asked_fact(facts, dialogue[i - 1]["content"], revealed) if i else None
            revealed |= {j for j, fact in enumerate(facts) if fact.rstrip(".").lower() in text.lower()}
            if asked is not None and states(facts[asked], text):
                revealed.add(asked)
    return revealed


def last_reply(dialogue: Dialogue) -> str:
    return next(message["content"] for message in reversed(dialogue) if message["role"] == "assistant")


def normalised(outcomes: Distribution) -> Distribution:
    """Merge equal texts and scale the weights to sum to 1."""
    merged = {}
    for text, weight in outcomes:
        if weight > 0:
            merged[text] = merged.get(text, 0.0) + weight
    total = sum(merged.values())
    return [(text, weight / total) for text, weight in merged.items()]


# Problems ---------------------------------------------------------------------------------------------------

def generate_rows(task: Task, split: str, count: int, seed: int = 0, facts: int | None = None) -> list[dict]:
    """Make rows of a split, different ones unless the task has too few; splits share none at any seed."""
    rng, seen, rows, misses = random.Random(f"{split} {seed}"), set(), [], 0
    facts, known = facts or next(iter(task.sizes)), " or ".join(map(str, sorted(task.sizes)))
    if facts not in task.sizes:
        raise UserError(f"problems are generated with {known} facts, not {facts}")
    if count > task.sizes[facts]:
        raise UserError(f"at most {task.sizes[facts]:,} problems of {facts} facts can be generated for a "
                        f"split, not {count:,}")
    while len(rows) < count:
        row = task.make(rng, facts)
        goal = task.parse(row, len(rows), task.equal).goal
        tenth = blake2b(" ".join(sorted(split_sentences(goal))).encode()).digest()[0] % 10   # in any order
        misses = misses + 1 if goal in seen or tenth not in SPLITS[split] else 0
        if tenth in SPLITS[split] and (goal not in seen or misses > 1000):       # then there are no others
            seen.add(goal)
            rows.append(row)
        elif misses > 10_000 and not rows:
            raise UserError(f"the task makes too few different problems: none fell into the {split} split")
    return rows


def generate_problems(task: Task, split: str, count: int, seed: int = 0,
                      facts: int | None = None) -> list[Problem]:
    return [task.parse(row, id, task.equal)
            for id, row in enumerate(generate_rows(task, split, count, seed, facts))]


@command
def main() -> None:
    parser = Parser("See problems and what they reward, or write some as JSONL.")
    parser.add_fields("task", "facts", "seed")
    parser.add_argument("--generate", type=number(int, 1), metavar="N", help="print N problems as JSONL")
    parser.add_argument("--split", choices=SPLITS, default="train", help="of the problems (default: train)")
    args = parser.parse_args()
    task, made = find_task(args.task), (args.split, args.generate or 3, args.seed, args.facts)
    if args.generate:
        print("\n".join(map(json.dumps, generate_rows(task, *made))))
        return
    for problem in generate_problems(task, *made):
        print(f"goal: {problem.goal}")
        for reply in (problem.solution, "I think that is it."):
            reward = task.reward(problem, [{"role": "assistant", "content": reply}], task.equal)
            print(f"   reward {reward:g} for {reply!r}")


if __name__ == "__main__":
    main()
