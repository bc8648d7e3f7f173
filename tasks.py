"""Problems, the user's hidden goal, and the reward.

A problem is a row of GSM8K's shape, `{"question": ..., "answer": "... #### 10"}`, or of MATH's,
`{"problem": ..., "solution": "... \\boxed{\\pi}"}`. Its sentences but the last are *facts*, its last one is
what is asked. The user knows facts and question, not the answer; the policy sees only the dialogue. The
reward is one number for the finished dialogue: 1 if the last marker of the last assistant message holds the
answer. Plain numbers are compared here, all else by math-verify (grader.py).

`generate_problems` makes small ones by seed; `read_problems` reads real ones. Both pass through
`parse_problem`, so nothing downstream knows the difference.

Run `python tasks.py` to see problems and what the grader says of some answers, and
`python tasks.py --generate 1000 --facts 2 > easy.jsonl` to write some to a file.
"""

import argparse
import json
import random
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from itertools import pairwise

from grader import equal

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Eva", "Max", "Lily")
ITEMS = ("apples", "books", "coins", "pens", "cards", "eggs", "shells", "stamps")
GAINS = ("finds", "buys", "gets", "picks")
LOSSES = ("gives", "throws")
# tenths of all possible problems
SPLITS = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}
LARGEST = 12                                                                        # of a number in a fact

# by facts, of some 6,000 and 350,000 problems in the smallest split
LARGEST_SPLIT = {2: 4_000, 3: 200_000}

# \[...\], \(...\), $$...$$ and $...$; "$5 and $7" are prices: a space before the second $, a digit behind it
MATHS = re.compile(r"\\[\[(](?:(?!\\[\[\]()]).)*\\[\])]|\$\$[^$]+\$\$"
                   r"|(?<![\w\\$])\$(?=[^\s$])(?:\\.|[^$\\])*(?<=\S)\$(?!\d)", re.DOTALL)
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]\$)|(?<=[.!?]\\\]))\s+(?=[A-Z0-9\"'$(])")


@dataclass(frozen=True)
class Problem:
    """One problem. `facts` and `ask` are the user's hidden goal; user and policy never see the rest."""
    id: int                     # position in its list: keys random draws
    question: str               # facts and question, as one text
    facts: tuple[str, ...]      # in the order of the text
    ask: str                    # the last sentence
    solution: str               # a worked answer that ends in the marker
    answer: str                 # what the marker must hold

    @property
    def goal(self) -> str:
        """What the user wants and knows: never the answer."""
        return self.question


def split_sentences(text: str) -> list[str]:
    """Cut a text after . ! or ? where white space and a capital, digit, quote or $ follow, never in maths."""
    text = text.strip()
    joined = MATHS.sub(lambda maths: re.sub(r"\s", "_", maths[0]), text)           # no white space, no cut
    cuts = [0, *(end.end() for end in SENTENCE_END.finditer(joined)), len(text)]
    return [text[start:end].strip() for start, end in pairwise(cuts) if text[start:end].strip()]


def marked_answer(text: str) -> str | None:
    """Return what stands behind the last `####` or inside the last `\\boxed{}` of a text, None if there is
    no marker or the last one is a box left open.
    """
    marker = None
    for marker in re.finditer(r"####|\\boxed\{", text):
        pass
    if marker is None:
        return None
    behind, depth = text[marker.end():], 1
    if marker[0] == "####":
        return re.split(r"\n|\\boxed", behind, maxsplit=1)[0].strip()
    for brace in re.finditer(r"\\[{}]|[{}]", behind):                            # \{ and \} close nothing
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return behind[:brace.start()].strip()
    return None


def number(text: str) -> Decimal | None:
    """Read a plain number; `$`, thousands commas, a full stop at the end, `%` and unit words do not
    matter.
    """
    match = re.fullmatch(r"\$?\s*([-\u2212]?)\s*\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\s*(?:%|[A-Za-z ]*)\s*\.?",
                         text.strip()[:100])
    return Decimal(("-" if match[1] else "") + match[2].replace(",", "")
                   + (match[3] or "")) if match else None


def gold_number(answer: str) -> Decimal | None:
    """Read a right answer that is a plain number: letters right behind it are no unit, as in 2x or 3i."""
    return None if re.search(r"\d[A-Za-z]|\d [A-Za-z]\b", answer) else number(answer)


def read_text(path: str) -> str:
    """Return a file's text.

    Raises: ValueError if it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_json(text: str, place: str) -> object:
    """Return what a JSON text holds.

    Raises: ValueError naming the place if it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error})") from None


def parse_lines(text: str, path: str) -> list[tuple[int, object]]:
    """Return (line number, record) for every line of a file's text that is not blank.

    Raises: ValueError if there is none, or one that is not JSON.
    """
    records = [(line, parse_json(record, f"{path}, line {line}"))
               for line, record in enumerate(text.split("\n"), start=1) if record.strip()]
    if not records:
        raise ValueError(f"{path} is empty")
    return records


def read_jsonl(path: str) -> list[tuple[int, object]]:
    """Return (line number, record) for every line of a file that is not blank.

    Raises: ValueError if the file cannot be read, is empty, or has a line that is not JSON.
    """
    return parse_lines(read_text(path), path)


def read_hub(path: str) -> list[dict]:
    """Return the rows of `hf:NAME` or `hf:NAME:SPLIT`, a data set of the Hugging Face hub.

    Raises: ValueError if the datasets package is missing or cannot load it.
    """
    name, _, split = path.removeprefix("hf:").partition(":")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{path} needs the datasets package: pip install datasets") from None
    try:
        return list(load_dataset(name, "main" if name.endswith("/gsm8k") else None, split=split or "train"))
    except Exception as error:                              # network, hub and cache have errors of their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} cannot be loaded ({reason})") from None


def read_rows(path: str) -> list[tuple[str, object]]:
    """Return (place, row) for every row of a JSONL file, a JSON list or a data set of the hub.

    Raises: ValueError if there are none, or naming what cannot be read.
    """
    if path.startswith("hf:"):
        rows = read_hub(path)
    else:
        text = read_text(path)
        if not text.lstrip().startswith("["):
            return [(f"{path}, line {line}", row) for line, row in parse_lines(text, path)]
        rows = parse_json(text, path)
    if not rows:
        raise ValueError(f"{path} is empty")
    return [(f"{path}, record {record}", row) for record, row in enumerate(rows, start=1)]


def check_text(text: str) -> None:
    """Raise ValueError for text that no tokenizer takes: half a surrogate pair, as JSON may hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not a text: {error.reason} at character {error.start + 1}") from None


def texts(row: dict, *fields: str) -> list[str]:
    """Return those of some fields that hold a text.

    Raises: ValueError if none does.
    """
    found = [row[field].strip() for field in fields if isinstance(row.get(field), str) and row[field].strip()]
    if not found:
        names, given = " or ".join(f"'{field}'" for field in fields), [row.get(field) for field in fields]
        raise ValueError(f"{names} must be a text that is not empty, got {given!r:.60}")
    check_text("".join(found))
    return found


def parse_problem(row: dict, id: int) -> Problem:
    """Turn a row of GSM8K's or MATH's shape into a problem.

    Raises: ValueError if a field is missing or not text, or if there is no marked answer that can be graded.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with question and answer, got {type(row).__name__}")
    question = texts(row, "question", "problem")[0]
    worked = max(texts(row, "solution", "answer"), key=lambda text: marked_answer(text) is not None)
    solution = re.sub(r"<<[^<>]*>>", "", worked).strip()                         # GSM8K's calculator notes
    answer = marked_answer(solution)
    if answer is None or number(answer) is None and "\\boxed" not in solution:
        raise ValueError(f"the answer must end in '#### n' or a boxed number, got {worked[-30:]!r}")
    if gold_number(answer) is None and not equal(answer, answer):
        raise ValueError(f"the answer must be a number or what math-verify can read, got {answer!r:.60}")
    *facts, ask = split_sentences(question)
    return Problem(id, question, tuple(facts), ask, solution, answer)


def read_problems(path: str) -> list[Problem]:
    """Read rows from a JSONL file, a JSON list, or `hf:openai/gsm8k`, `hf:openai/gsm8k:test`.

    Raises: ValueError naming the file and the line or record.
    """
    problems = []
    for place, row in read_rows(path):
        try:
            problems.append(parse_problem(row, len(problems)))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return problems


def generate_row(rng: random.Random, facts: int = 3) -> dict:
    """Make one row: two or three facts in any order, the question, and the answer with its work shown."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    first, more = rng.randint(2, LARGEST), rng.randint(2, LARGEST)
    total = first + more
    away = rng.randint(2, min(LARGEST, total - 1)) if facts == 3 else 0
    told = [f"{name} has {first} {items} at first.",
            f"{name} {rng.choice(GAINS)} {more} more {items}."]
    work = f"{first} + {more} = {total}"
    if facts == 3:
        told.append(f"{name} {rng.choice(LOSSES)} {away} {items} away.")
        work += f", {total} - {away} = {total - away}"
    rng.shuffle(told)
    return {"question": " ".join([*told, f"How many {items} does {name} have now?"]),
            "answer": f"{work}. #### {total - away}"}


def generate_problems(split: str, count: int, seed: int = 0, facts: int = 3) -> list[Problem]:
    """Make `count` different problems of a split; splits share none, whatever the seeds.

    Raises: ValueError if there are hardly so many.
    """
    rng, seen, problems = random.Random(f"{split} {seed}"), set(), []
    if facts not in LARGEST_SPLIT:
        raise ValueError(f"problems are generated with 2 or 3 facts, not {facts}")
    if count > LARGEST_SPLIT[facts]:
        raise ValueError(f"at most {LARGEST_SPLIT[facts]:,} problems of {facts} facts can be generated for a "
                         f"split, not {count:,}")
    while len(problems) < count:
        row = generate_row(rng, facts)
        same_facts = " ".join(sorted(split_sentences(row["question"])))           # whatever their order
        tenth = blake2b(same_facts.encode()).digest()[0] % 10
        if row["question"] not in seen and tenth in SPLITS[split]:
            seen.add(row["question"])
            problems.append(parse_problem(row, len(problems)))
    return problems


def reward(problem: Problem, reply: str) -> float:
    """Return 1.0 if the last marker of the final assistant message holds the answer, else 0.0.

    Raises: GradingError if math-verify is needed and comes to no verdict.
    """
    given = marked_answer(reply)
    if given is None:
        return 0.0
    gold, value = gold_number(problem.answer), number(given)
    if gold is None:
        return float(equal(problem.answer, given))
    if value is None and re.search(r"[\\/{]", given):                            # 20/2, \frac{20}{2}, 1{,}000
        return float(equal(f"{gold:f}", given))
    return float(value == gold)


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"tasks.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="See problems and rewards, or write problems as JSONL.",
                                     allow_abbrev=False)
    parser.add_argument("--generate", type=int, metavar="N", help="print N problems as JSONL")
    parser.add_argument("--facts", type=int, choices=LARGEST_SPLIT, default=3,
                        help="of a problem; 2 are easier (default: 3)")
    parser.add_argument("--split", choices=SPLITS, default="train", help="of --generate (default: train)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default: 0)")
    parser.error = fail
    args = parser.parse_args()
    if args.generate is not None:
        try:
            if args.generate < 1:
                raise ValueError("--generate must be at least 1")
            problems = generate_problems(args.split, args.generate, args.seed, args.facts)
        except ValueError as error:
            fail(str(error))
        for problem in problems:
            print(json.dumps({"question": problem.question, "answer": problem.solution}))
        return
    for split in SPLITS:
        for problem in generate_problems(split, 2, args.seed, args.facts):
            print(f"{split:10s} {problem.question}\n           {problem.solution}")
    problem = generate_problems("test", 1, args.seed, args.facts)[0]
    for reply in (problem.solution, f"#### ${problem.answer}.00 apples.", f"I think it is {problem.answer}",
                  "#### 1 #### 2"):
        print(f"reward {reward(problem, reply)} for {reply!r}")


if __name__ == "__main__":
    main()
