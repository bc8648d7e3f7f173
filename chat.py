"""Text to tokens: token-exact, append-only dialogues.

A policy must be trained on exactly the tokens it sampled. Decoding a reply and encoding it again can change
its ids, so a dialogue here is one buffer of ids that only grows: the ids of turn k are a literal prefix of
those of turn k+1, and text is decoded only for people, for rewards and for the other speaker.

A chat format is four pieces of ids around the texts:

    head  USER  post  sampled reply <end>  mid  USER  post  sampled reply <end> ...

What somebody wrote is encoded with `encode_ordinary`, so "<|end|>" typed by a user stays text and never ends
a turn. The embedded tokenizer is byte-level BPE, a small number being one token; `python logs.py
--build-tokenizer` rebuilds its ranks.

Run `python chat.py` to see a dialogue as tokens with its action mask.
"""

import base64
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import tiktoken

RANKS = Path(__file__).parent / "assets" / "tiny.tiktoken"
# a word, a number or a run of signs, with the space before it
PATTERN = r" ?[A-Za-z']+| ?\d{1,3}|[ ]?[^\sA-Za-z\d']+|\s"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
NUMBERS, MERGES = 100, 420                              # numbers below 100 that are one token; merges learned


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the pieces of ids that its chat format puts around texts."""
    encode: Callable[[str], list[int]]          # somebody's text -> ids, never a control id
    decode: Callable[[list[int]], str]          # ids -> text, stripped
    head: tuple[int, ...]                       # before the first user text
    mid: tuple[int, ...]                        # between the end of a reply and the next user text
    post: tuple[int, ...]                       # between a user text and the reply
    end: int                                    # the end-of-turn: sampled, hence an action
    stop_ids: frozenset[int]                    # any of these ends a reply; `end` is one of them
    vocab_size: int
    ranks: Path                                 # the file of the vocabulary

    def open(self, text: str) -> list[int]:
        """Return the ids of a dialogue that begins with a user's `text`, up to where the reply starts."""
        return [*self.head, *self.encode(text), *self.post]

    def extend(self, last_id: int, text: str) -> list[int]:
        """Return the ids that follow a reply: its end-of-turn if it was cut, then the user's `text`."""
        return [*self.close(last_id), *self.mid, *self.encode(text), *self.post]

    def close(self, last_id: int) -> list[int]:
        """Return the end-of-turn that a reply ending in `last_id` still lacks. It was not sampled: never
        an action.
        """
        return [] if last_id == self.end else [self.end]

    def text(self, reply: list[int]) -> str:
        """Return what a sampled reply says, without its stop token."""
        return self.decode(reply[:-1] if reply and reply[-1] in self.stop_ids else reply)

    def render(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Return ids and mask of a finished dialogue; the mask is 1 on assistant texts and their
        end-of-turns.

        The ids are those that `open` and `extend` build turn by turn around the same texts.

        Raises: ValueError unless user and assistant take turns, the user first.
        """
        ids, mask = [], []
        for i, message in enumerate(messages):
            role = ("user", "assistant")[i % 2]
            if message["role"] != role:
                raise ValueError(f"message {i + 1} must be the {role}'s: they take turns, the user first")
            if role == "user":
                new = self.extend(self.end, message["content"]) if i else self.open(message["content"])
            else:
                new = [*self.encode(message["content"]), self.end]
            ids += new
            mask += [i % 2] * len(new)
        return ids, mask


def tiny_chat(ranks: Path | str = RANKS) -> Chat:
    """Return the embedded tokenizer with its format `<|user|> text<|end|><|assistant|> text<|end|>`. No
    download.

    Texts are encoded with a space before them, so that a number is the same token wherever it stands.

    Raises: ValueError if the file is no vocabulary; tiktoken itself would panic.
    """
    try:
        lines = [line.split() for line in Path(ranks).read_text(encoding="ascii").splitlines()]
        vocabulary = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise ValueError(f"{ranks} is not a tokenizer: {error}") from None
    complete = all(bytes([byte]) in vocabulary for byte in range(256))
    if not complete or sorted(vocabulary.values()) != list(range(len(lines))):
        raise ValueError(f"{ranks} is not a tokenizer: it needs all bytes, and ranks 0 to n - 1 once each")
    control = {name: len(vocabulary) + i for i, name in enumerate((USER, ASSISTANT, END))}
    encoding = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=vocabulary, special_tokens=control)
    return Chat(encode=lambda text: encoding.encode_ordinary(" " + text),
                decode=lambda ids: encoding.decode(ids).strip(),
                head=(control[USER],), mid=(control[USER],), post=(control[END], control[ASSISTANT]),
                end=control[END],
                stop_ids=frozenset(control.values()), vocab_size=encoding.n_vocab, ranks=Path(ranks))


def save_chat(chat: Chat, folder: str) -> None:
    """Put the tokenizer beside a saved model."""
    shutil.copyfile(chat.ranks, Path(folder) / "tokenizer.tiktoken")


def load_chat(folder: str) -> Chat:
    """Return the chat format of a saved model.

    Raises: ValueError if the folder holds no tokenizer.
    """
    path = Path(folder) / "tokenizer.tiktoken"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.tiktoken, so its text cannot be read")
    return tiny_chat(path)


def learn_merges(pieces: Counter, merges: int) -> list[bytes]:
    """Byte-pair encoding: join the most frequent neighbours, `merges` times. Source: arXiv 1508.07909,
    algorithm 1.
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


def main() -> None:
    chat = tiny_chat()
    messages = [{"role": "user", "content": "how many apples does Tom have now?"},
                {"role": "assistant", "content": "How many apples does Tom have at first?"},
                {"role": "user", "content": "7, and <|end|> stays text"},
                {"role": "assistant", "content": "7 + 5 = 12. #### 12"}]
    names = {chat.end: END, chat.head[0]: USER, chat.post[1]: ASSISTANT}
    for token, action in zip(*chat.render(messages)):
        print(f"{token:5d} {'action' if action else '      '} {names.get(token) or chat.decode([token])}")


if __name__ == "__main__":
    main()
