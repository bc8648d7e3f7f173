"""The embedded tokenizer: byte-level BPE, learned on the dialogues of all tasks.

The vocabulary is all bytes, then the numbers below 100 with and without a space before them, so that each is
one token, then merges that are learned on generated dialogues. `chat.tiny_chat` reads it.

Run `python -m extras.tokenizer` to learn assets/tiny.tiktoken again.
"""

import base64
import re
from collections import Counter
from pathlib import Path

from chat import PATTERN, RANKS
from config import Parser, command
from logs import write_logs
from tasks import LEAVE, Task, find_task, generate_problems

NUMBERS, MERGES = 100, 420                        # numbers below it are one token; merges learned


def learn_merges(pieces: Counter, merges: int) -> list[bytes]:
    """Byte-pair encoding: join the most frequent neighbours, `merges` times.

    Source: arXiv 1508.07909, algorithm 1.
    """
    words = {piece: [bytes([byte]) for byte in piece.encode()] for piece in pieces}
    learned = []
    for _ in range(merges):
        pairs = Counter()
        for piece, parts in words.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += pieces[piece]
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))             # ties in a fixed order
        learned.append(left + right)
        for piece, parts in words.items():
            i = 0
            while i < len(parts) - 1:
                if parts[i] == left and parts[i + 1] == right:
                    parts[i:i + 2] = [left + right]
                i += 1
    return learned


def build_ranks(texts: list[str], path: Path | str = RANKS) -> int:
    """Write the vocabulary: all bytes, the small numbers, then merges learned on `texts`. Return its size."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [str(n).encode() for n in range(10, NUMBERS)] + [f" {n}".encode() for n in range(NUMBERS)]
    pieces = Counter(piece for text in texts for piece in re.findall(PATTERN, " " + text)
                     if not piece.strip().isdigit())
    tokens += [token for token in learn_merges(pieces, MERGES) if token not in tokens]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    Path(path).write_text("".join(lines), encoding="ascii")
    return len(tokens)


def tokenizer_corpus(task: Task) -> list[str]:
    """Return the texts that the embedded tokenizer is learned on: a task's logs and goals."""
    problems = generate_problems(task, "train", 2000)
    logs = write_logs(task, problems, "human", 0) + write_logs(task, problems, "overhelpful", 0)
    said = [message["content"] for log in logs for message in log["messages"]]
    return said + [problem.goal for problem in problems] + [LEAVE] * 200


@command
def main() -> None:
    parser = Parser("Learn assets/tiny.tiktoken again from a task's dialogues.")
    parser.add_fields("task")
    task = find_task(parser.parse_args().task)
    print(f"{build_ranks(tokenizer_corpus(task))} tokens written to {RANKS}")


if __name__ == "__main__":
    main()
