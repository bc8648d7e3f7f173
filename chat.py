"""Text to tokens: token-exact, append-only dialogues.

A policy must be trained on exactly the tokens it sampled. Decoding a reply and encoding it again can change
its ids, so a dialogue here is one buffer of ids that only grows: the ids of turn k are a literal prefix of
those of turn k+1, and text is decoded only for people, for rewards and for the other speaker.

A chat format is four pieces of ids around the texts:

    head  USER  post  sampled reply <end>  mid  USER  post  sampled reply <end> ...

`template_chat` finds them in a Hugging Face chat template, once, by rendering marked texts; a template that
rewrites what it has already rendered has no such pieces and is refused. `tiny_chat` is the embedded format:
byte-level BPE, a small number being one token; `python logs.py --build-tokenizer` rebuilds its ranks.

What somebody wrote is encoded without control tokens, so "<|end|>" typed by a user stays text and never ends
a turn.

Run `python chat.py` to see a dialogue as tokens with its action mask, `python chat.py MODEL` for a model's
own format.
"""

import argparse
import base64
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiktoken
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

logging.set_verbosity_error()                           # what matters of it is raised here as an error

RANKS = Path(__file__).parent / "assets" / "tiny.tiktoken"
# a word, a number or a run of signs, with the space before it
PATTERN = r" ?[A-Za-z']+| ?\d{1,3}|[ ]?[^\sA-Za-z\d']+|\s"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
TIKTOKEN = "tokenizer.tiktoken"                         # the embedded tokenizer's name beside a saved model
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
    vocab_size: int                             # ids are below it
    save: Callable[[str], None]                 # writes the tokenizer beside a saved model

    def open(self, text: str) -> list[int]:
        """Return the ids of a dialogue that begins with a user's `text`, up to where the reply starts."""
        return [*self.head, *self.encode(text), *self.post]

    def extend(self, last_id: int, text: str) -> list[int]:
        """Return the ids that follow a reply: its end-of-turn if it was cut, then the user's `text`."""
        return [*self.close(last_id), *self.mid, *self.encode(text), *self.post]

    def close(self, last_id: int) -> list[int]:
        """Return the end-of-turn that a reply still lacks after `last_id`; unsampled, so never an action."""
        return [] if last_id == self.end else [self.end]

    def text(self, reply: list[int]) -> str:
        """Return what a sampled reply says, without its stop token."""
        return self.decode(reply[:-1] if reply and reply[-1] in self.stop_ids else reply)

    def render(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Return ids and mask (1 on assistant texts and their end-of-turns) of a finished dialogue.

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
                stop_ids=frozenset(control.values()), vocab_size=encoding.n_vocab,
                save=lambda folder: shutil.copyfile(ranks, Path(folder) / TIKTOKEN))


# Hugging Face's formats -------------------------------------------------------------------------------------

def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the same tokenizer without control tokens, for text that people and models wrote.

    Raises: ValueError if it would turn some text into a control token all the same.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    control = [token for token in state["added_tokens"] if token["content"].strip()]
    state["added_tokens"] = [token for token in state["added_tokens"] if token not in control]
    state |= {"post_processor": None, "truncation": None, "padding": None}
    plain = Tokenizer.from_str(json.dumps(state))
    ids = {token["id"] for token in control}
    for token in control:
        if ids & set(plain.encode(token["content"], add_special_tokens=False).ids):
            raise ValueError(f"its tokenizer reads {token['content']!r} in a text as a control token")
    return plain


def template_pieces(tokenizer: PreTrainedTokenizerBase, instruction: str) -> tuple[str, str, str]:
    """Return what a chat template puts before a dialogue, after a reply, and before one: head, mid, post.

    The instruction is a system message or, if the template has none, the beginning of the first user text.

    Raises: ValueError if turns do not keep their rendering when others follow.
    """
    marks = [f"text{i}mark" for i in range(5)]

    def render(turns: int, system: list[dict]) -> list[str]:
        roles = [{"role": ("user", "assistant")[i % 2], "content": mark}
                 for i, mark in enumerate(marks[:turns])]
        text = tokenizer.apply_chat_template(system + roles, tokenize=False, add_generation_prompt=True,
                                             enable_thinking=False, date_string="26 Jul 2024")
        return re.split("|".join(marks), text)

    system = [{"role": "system", "content": instruction}] if instruction else []
    try:
        pieces = render(1, system)
    except TemplateError:
        pieces = [""]
    before = ""
    if instruction not in pieces[0]:
        system, before = [], instruction + "\n\n"
    once, twice, thrice = (render(turns, system) for turns in (1, 3, 5))
    head, reply, mid, post = twice if len(twice) == 4 else ("",) * 4
    if once != [head, post] or thrice != [head, reply, mid, reply, mid, post] \
            or not re.fullmatch(re.escape(reply) + r"(<think>\s*</think>\s*)?", post):
        raise ValueError("its chat template renders a turn differently when others follow, or thinks before "
                         "it replies: no literal prefix, so no token-exact training")
    return head + before, mid, post


def template_chat(tokenizer: PreTrainedTokenizerBase, instruction: str = "",
                  stop_ids: set[int] = frozenset()) -> Chat:
    """Return a Hugging Face tokenizer with its chat template as a format that begins with `instruction`.

    Hybrid thinking models run with thinking off: the empty block stays in the buffer where the template would
    strip it from history.

    Raises: ValueError naming what the template or the tokenizer lacks.
    """
    if not tokenizer.chat_template:
        raise ValueError("its tokenizer has no chat template: not a model that was taught to chat")
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer has no tokenizer.json")
    plain, control = plain_tokenizer(tokenizer), tokenizer.added_tokens_decoder
    head, mid, post = (tokenizer.encode(piece, add_special_tokens=False)
                       for piece in template_pieces(tokenizer, instruction))
    if not mid or mid[0] not in control:
        raise ValueError("its chat template ends replies with text instead of a control token")
    stops = {mid[0], *stop_ids, *({tokenizer.eos_token_id} - {None})}

    def save(folder: str) -> None:
        tokenizer.save_pretrained(folder)
        GenerationConfig(eos_token_id=sorted(stops), bos_token_id=tokenizer.bos_token_id, do_sample=True,
                         pad_token_id=tokenizer.pad_token_id, temperature=1.0, top_k=0,
                         top_p=1.0).save_pretrained(folder)

    return Chat(encode=lambda text: plain.encode(text.strip(), add_special_tokens=False).ids,
                decode=lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip(),
                head=tuple(head), mid=tuple(mid[1:]), post=tuple(post), end=mid[0], stop_ids=frozenset(stops),
                vocab_size=max(tokenizer.get_vocab().values()) + 1, save=save)


def located(source: str) -> tuple[str, dict]:
    """Return where transformers finds a model, and as which file if it is a GGUF.

    Raises: ValueError if `source` is no folder of a model, no GGUF file and cannot be a hub id.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{source} is not a model: it has no config.json")
        return str(source), {}
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.exists() or path.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        raise ValueError(f"{source} is not a model: no folder, no .gguf file and no id as Qwen/Qwen3-0.6B is")
    return str(source), {}


def one_line(error: Exception) -> str:
    """Return the beginning of a message of several lines, as one."""
    return " ".join(str(error).split())[:160]


def is_embedded(source: str) -> bool:
    """Whether a folder holds a model that speaks the embedded format."""
    return (Path(source) / TIKTOKEN).is_file()


def load_chat(source: str, instruction: str = "") -> Chat:
    """Return the chat format of a model: folder, GGUF file or hub id.

    The embedded format knows no instructions.

    Raises: ValueError if there is no tokenizer, or none with a usable chat template.
    """
    if is_embedded(source):
        return tiny_chat(Path(source) / TIKTOKEN)
    folder, gguf = located(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf)
    except Exception as error:                               # of any type: transformers, tokenizers, network
        raise ValueError(f"{source} has no tokenizer that can be read: {one_line(error)}") from None
    try:
        stops = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError as error:
        if "does not appear to have a file" not in str(error):                  # a model need not have one
            raise ValueError(f"{source} has stop tokens that cannot be read: {one_line(error)}") from None
        stops = None
    try:
        return template_chat(tokenizer, instruction,
                             {*(stops if isinstance(stops, list) else [stops])} - {None})
    except (ValueError, TemplateError) as error:
        raise ValueError(f"{source}: {one_line(error)}") from None


# Building the embedded tokenizer ----------------------------------------------------------------------------

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


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"chat.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a dialogue as tokens.", allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="folder, GGUF file or hub id (default: the embedded format)")
    parser.error = fail
    source = parser.parse_args().model
    try:
        chat = load_chat(source) if source else tiny_chat()
    except ValueError as error:
        fail(str(error))
    messages = [{"role": "user", "content": "how many apples does Tom have now?"},
                {"role": "assistant", "content": "How many apples does Tom have at first?"},
                {"role": "user", "content": "7, and <|end|> stays text"},
                {"role": "assistant", "content": "7 + 5 = 12. #### 12"}]
    names = {} if source else {chat.end: END, chat.head[0]: USER, chat.post[1]: ASSISTANT}
    for token, action in zip(*chat.render(messages)):
        print(f"{token:6d} {'action' if action else '      '} {names.get(token) or chat.decode([token])}")


if __name__ == "__main__":
    main()
