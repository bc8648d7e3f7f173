"""Problems, the user's hidden goal, and the reward.

A problem is a row of GSM8K's shape, `{"question": ..., "answer": "... #### 10"}`. Its sentences but the last
are *facts*, its last one is what is asked. The user knows facts and question, not the answer; the policy sees
only the dialogue. The reward is one number for the finished dialogue: 1 if the last marker of the last
assistant message holds the answer.

`generate_problems` makes small ones by seed; `read_problems` reads real ones. Both pass through
`parse_problem`, so nothing downstream knows the difference.

Run `python tasks.py` to see problems and what the grader says of some answers.
"""

import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Eva", "Max", "Lily")
ITEMS = ("apples", "books", "coins", "pens", "cards", "eggs", "shells", "stamps")
GAINS = ("finds", "buys", "gets", "picks")
LOSSES = ("gives", "throws")
# tenths of all possible problems
SPLITS = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}
LARGEST = 12                                                                        # of a number in a fact

LARGEST_SPLIT = 200_000                                      # of some 350,000 problems in the smallest split


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
    """Cut a text after . ! or ? where white space and a capital, digit, quote or $ follow."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"'$(])", text.strip()) if s.strip()]


def marked_answer(text: str) -> str | None:
    """Return what stands behind the last `####` or inside the last `\\boxed{}` of a text, None if there is
    no marker.
    """
    markers = list(re.finditer(r"####((?:(?!####|\\boxed)[^\n])*)|\\boxed\{([^{}\n]*)\}", text))
    return (markers[-1][1] or markers[-1][2] or "").strip() if markers else None


def number(text: str) -> Decimal | None:
    """Read a plain number; `$`, thousands commas, a full stop at the end, `%` and unit words do not
    matter.
    """
    match = re.fullmatch(r"\$?\s*([-\u2212]?)\s*\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\s*(?:%|[A-Za-z ]*)\s*\.?",
                         text.strip()[:100])
    return Decimal(("-" if match[1] else "") + match[2].replace(",", "")
                   + (match[3] or "")) if match else None


def read_jsonl(path: str) -> list[tuple[int, object]]:
    """Return (line number, record) for every line that is not blank.

    Raises: ValueError if the file cannot be read, is empty, or has a line that is not JSON.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    records = []
    for line, text in enumerate(lines, start=1):
        if text.strip():
            try:
                records.append((line, json.loads(text)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: not JSON ({error})") from None
    if not records:
        raise ValueError(f"{path} is empty")
    return records


def check_text(text: str) -> None:
    """Raise ValueError for text that no tokenizer takes: half a surrogate pair, as JSON may hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not a text: {error.reason} at character {error.start + 1}") from None


def parse_problem(row: dict, id: int) -> Problem:
    """Turn a row of GSM8K's shape into a problem.

    Raises: ValueError if a field is missing or not text, or if the answer has no marked number.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with question and answer, got {type(row).__name__}")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ValueError(f"'{field}' must be a text that is not empty, got {row.get(field)!r}")
        check_text(row[field])
    solution = re.sub(r"<<[^<>]*>>", "", row["answer"]).strip()                   # GSM8K's calculator notes
    answer = marked_answer(solution)
    if answer is None or number(answer) is None:
        raise ValueError(f"the answer must end in '#### n' or a boxed number, got {row['answer'][-30:]!r}")
    *facts, ask = split_sentences(row["question"])
    return Problem(id, row["question"].strip(), tuple(facts), ask, solution, answer)


def read_problems(path: str) -> list[Problem]:
    """Read a JSONL file of rows.

    Raises: ValueError naming the file and the line.
    """
    problems = []
    for line, row in read_jsonl(path):
        try:
            problems.append(parse_problem(row, len(problems)))
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    return problems


def generate_row(rng: random.Random) -> dict:
    """Make one row: three facts in any order, the question, and the answer with its work shown."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    first, more = rng.randint(2, LARGEST), rng.randint(2, LARGEST)
    away = rng.randint(2, min(LARGEST, first + more - 1))
    facts = [f"{name} has {first} {items} at first.",
             f"{name} {rng.choice(GAINS)} {more} more {items}.",
             f"{name} {rng.choice(LOSSES)} {away} {items} away."]
    rng.shuffle(facts)
    total = first + more
    return {"question": " ".join([*facts, f"How many {items} does {name} have now?"]),
            "answer": f"{first} + {more} = {total}, {total} - {away} = {total - away}. #### {total - away}"}


def generate_problems(split: str, count: int, seed: int = 0) -> list[Problem]:
    """Make `count` different problems of a split; splits share none, whatever the seeds.

    Raises: ValueError if there are hardly so many.
    """
    rng, seen, problems = random.Random(f"{split} {seed}"), set(), []
    if count > LARGEST_SPLIT:
        raise ValueError(f"at most {LARGEST_SPLIT:,} problems can be generated for a split, not {count:,}")
    while len(problems) < count:
        row = generate_row(rng)
        same_facts = " ".join(sorted(split_sentences(row["question"])))           # whatever their order
        tenth = blake2b(same_facts.encode()).digest()[0] % 10
        if row["question"] not in seen and tenth in SPLITS[split]:
            seen.add(row["question"])
            problems.append(parse_problem(row, len(problems)))
    return problems


def reward(problem: Problem, reply: str) -> float:
    """Return 1.0 if the last marker of the final assistant message holds the answer, else 0.0."""
    given = marked_answer(reply)
    return float(given is not None and number(given) is not None and number(given) == number(problem.answer))


def main() -> None:
    for split in SPLITS:
        for problem in generate_problems(split, 2):
            print(f"{split:10s} {problem.question}\n           {problem.solution}")
    problem = generate_problems("test", 1)[0]
    for reply in (problem.solution, f"#### ${problem.answer}.00 apples.", f"I think it is {problem.answer}",
                  "#### 1 #### 2"):
        print(f"reward {reward(problem, reply)} for {reply!r}")


if __name__ == "__main__":
    main()
