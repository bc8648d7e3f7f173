"""Text to tokens: token-exact, append-only dialogues.

A policy must be trained on exactly the tokens it sampled. Decoding a reply and encoding it again can change
its ids, so a dialogue here is one buffer of ids that only grows: the ids of turn k are a literal prefix of
those of turn k+1, and text is decoded only for people, for rewards and for the other speaker.

A chat format is four pieces of ids around the texts:

    head  USER  post  sampled reply <end>  mid  USER  post  sampled reply <end> ...

`tiny_chat` is the embedded format: byte-level BPE in which every number below 100 is one token
(extras/tokenizer.py learns it). extras/hf.py finds the four pieces in a Hugging Face chat template.

What a person or a model wrote is encoded without control tokens, so "<|end|>" typed by a user stays text and
never ends a turn.

Run `python chat.py` to see a dialogue as tokens with its action mask, `python chat.py MODEL` for a model's
own format.
"""

import base64
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from config import EMBEDDED, Parser, UserError, command

RANKS = Path(__file__).parent / "assets" / "tiny.tiktoken"
# a word, a number or a run of signs, with the space before it
PATTERN = r" ?[A-Za-z']+| ?\d{1,3}|[ ]?[^\sA-Za-z\d']+|\s"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the pieces of ids that its chat format puts around texts."""
    encode: Callable[[str], list[int]]          # text that somebody wrote -> ids, never a control id
    decode: Callable[[list[int]], str]          # ids -> text, stripped
    head: tuple[int, ...]                       # before the first user text
    mid: tuple[int, ...]                        # between the end of a reply and the next user text
    post: tuple[int, ...]                       # between a user text and the reply
    end: int                                    # the end-of-turn: sampled, hence an action
    stop_ids: frozenset[int]                    # any of these ends a reply; `end` is one of them
    vocab_size: int                             # all ids are below it
    save: Callable[[str], None]                 # writes the tokenizer beside a saved model

    def open(self, text: str) -> list[int]:
        """Return the ids of a dialogue that begins with a user's `text`, up to where the reply starts."""
        return [*self.head, *self.encode(text), *self.post]

    def extend(self, last_id: int, text: str) -> list[int]:
        """Return the ids that follow a reply: its end-of-turn if it was cut, then the user's `text`."""
        return [*self.close(last_id), *self.mid, *self.encode(text), *self.post]

    def close(self, last_id: int) -> list[int]:
        """Return the end-of-turn if a reply that ends in `last_id` lacks it. It is not sampled: no action."""
        return [] if last_id == self.end else [self.end]

    def text(self, reply: list[int]) -> str:
        """Return what a sampled reply says, without its stop token."""
        return self.decode(reply[:-1] if reply and reply[-1] in self.stop_ids else reply)

    def render(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Return ids and mask (1 on assistant texts and their end-of-turns) of a dialogue.

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
    """Return the embedded tokenizer with its format `<|user|> text<|end|><|assistant|> text<|end|>`.

    Texts are encoded with a space before them, so that a number is the same token wherever it stands.

    Raises: UserError if the file is no vocabulary; tiktoken itself would panic.
    """
    try:
        lines = [line.split() for line in Path(ranks).read_text(encoding="ascii").splitlines()]
        vocabulary = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise UserError(f"{ranks} is not a tokenizer: {error}") from None
    complete = all(bytes([byte]) in vocabulary for byte in range(256))
    if not complete or sorted(vocabulary.values()) != list(range(len(lines))):
        raise UserError(f"{ranks} is not a tokenizer: it needs all bytes, and ranks 0 to n - 1 once each")
    control = {name: len(vocabulary) + i for i, name in enumerate((USER, ASSISTANT, END))}
    encoding = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=vocabulary, special_tokens=control)
    return Chat(encode=lambda text: encoding.encode_ordinary(" " + text),
                decode=lambda ids: encoding.decode(ids).strip(),
                head=(control[USER],), mid=(control[USER],), post=(control[END], control[ASSISTANT]),
                end=control[END], stop_ids=frozenset(control.values()), vocab_size=encoding.n_vocab,
                save=lambda folder: shutil.copyfile(ranks, Path(folder) / EMBEDDED))


@command
def main() -> None:
    from extras.hf import load_chat
    parser = Parser("Show a dialogue as tokens.")
    parser.add_argument("model", nargs="?", help="folder, GGUF file or hub id (default: the embedded format)")
    source = parser.parse_args().model
    chat = load_chat(source) if source else tiny_chat()
    messages = [{"role": "user", "content": "how many apples does Tom have now?"},
                {"role": "assistant", "content": "How many apples does Tom have at first?"},
                {"role": "user", "content": "7, and <|end|> stays text"},
                {"role": "assistant", "content": "7 + 5 = 12. #### 12"}]
    for token, action in zip(*chat.render(messages)):
        print(f"{token:6d} {'action' if action else '      '} {chat.decode([token])}")


if __name__ == "__main__":
    main()
