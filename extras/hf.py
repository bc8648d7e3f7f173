"""Hugging Face's models: their weights and chat templates in, and ours out.

A model is named by its folder, by a GGUF file, or by its id on the Hugging Face hub, which downloads it:

    load_speaker("out/policy")    load_speaker("smollm2.gguf")    load_speaker("Qwen/Qwen2.5-0.5B-Instruct")

transformers reads configuration and weights (sharded, quantised to GGUF, or inside a multimodal checkpoint),
and our own transformer computes with them. What it does not compute is refused by name before any weight is
read. `save_speaker` writes what transformers and vLLM read.

A chat template becomes a `Chat` by rendering marked texts and cutting between them, once. A template that
renders earlier turns differently when others follow is refused: its dialogues could not only grow.

Run `python -m extras.hf SOURCE FOLDER` to convert a model and its tokenizer, a GGUF file for instance, into a
folder of safetensors.
"""

import json
import os
import re
import shutil
from pathlib import Path

import torch
from jinja2 import TemplateError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig,
                          PreTrainedTokenizerBase)
from transformers.utils import logging

from chat import Chat, tiny_chat
from config import EMBEDDED, Parser, UserError, command, is_embedded
from extras.lora import Adapter
from model import Transformer, check_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "gemma3_text": "Gemma3ForCausalLM"}
Speaker = tuple[Transformer, Chat]
logging.set_verbosity_error()                           # whatever matters is raised as an error below
logging.disable_progress_bar()


def one_line(error: Exception) -> str:
    """Return the beginning of a message of several lines, as one line."""
    return " ".join(str(error).split())[:160]


def located(source: str) -> tuple[str, dict]:
    """Return where transformers finds a model, and the option that names its file if it is a GGUF.

    Raises: UserError if `source` is no folder of a model, no GGUF file and cannot be a hub id.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{source} is not a model: it has no config.json")
        return str(source), {}
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.exists() or path.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        raise UserError(f"{source} is not a model: no folder, no .gguf file and no id as Qwen/Qwen3-0.6B is")
    return str(source), {}


# Chat templates ---------------------------------------------------------------------------------------------

def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the same tokenizer without control tokens, for text that people and models wrote.

    Raises: UserError if it would turn some text into a control token all the same.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    control = [token for token in state["added_tokens"] if token["content"].strip()]
    state["added_tokens"] = [token for token in state["added_tokens"] if token not in control]
    state |= {"post_processor": None, "truncation": None, "padding": None}
    plain = Tokenizer.from_str(json.dumps(state))
    ids = {token["id"] for token in control}
    for token in control:
        if ids & set(plain.encode(token["content"], add_special_tokens=False).ids):
            raise UserError(f"its tokenizer reads {token['content']!r} in a text as a control token")
    return plain


def template_pieces(tokenizer: PreTrainedTokenizerBase, instruction: str) -> tuple[str, str, str]:
    """Return what a chat template puts before a dialogue, after a reply, and before one: head, mid, post.

    The instruction is a system message or, if the template has none, the beginning of the first user text.

    Raises: UserError if turns do not keep their rendering when others follow.
    """
    marks = [f"text{i}mark" for i in range(5)]

    def render(turns: int, system: list[dict]) -> list[str]:
        roles = [{"role": ("user", "assistant")[i % 2], "content": mark}
                 for i, mark in enumerate(marks[:turns])]
        try:
            text = tokenizer.apply_chat_template(system + roles, tokenize=False, add_generation_prompt=True,
                                                 enable_thinking=False, date_string="26 Jul 2024")
        except ValueError as error:                      # several templates without a default, for instance
            raise UserError(one_line(error)) from None
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
        raise UserError("its chat template renders a turn differently when others follow, or thinks before "
                        "it replies: no literal prefix, so no token-exact training")
    return head + before, mid, post


def template_chat(tokenizer: PreTrainedTokenizerBase, instruction: str = "",
                  stop_ids: set[int] = frozenset()) -> Chat:
    """Return a Hugging Face tokenizer with its chat template as a format that begins with `instruction`.

    Hybrid thinking models run with thinking off: the empty block stays in the buffer where the template would
    strip it from history.

    Raises: UserError naming what the template or the tokenizer lacks.
    """
    if not tokenizer.chat_template:
        raise UserError("its tokenizer has no chat template: not a model that was taught to chat")
    if not tokenizer.is_fast:
        raise UserError("its tokenizer has no tokenizer.json")
    plain, control = plain_tokenizer(tokenizer), tokenizer.added_tokens_decoder
    head, mid, post = (tokenizer.encode(piece, add_special_tokens=False)
                       for piece in template_pieces(tokenizer, instruction))
    if not mid or mid[0] not in control:
        raise UserError("its chat template ends replies with text instead of a control token")
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


def load_chat(source: str, instruction: str = "") -> Chat:
    """Return the chat format of a model: folder, GGUF file or hub id.

    The embedded format knows no instructions.

    Raises: UserError if there is no tokenizer, or none with a usable chat template.
    """
    if is_embedded(source):
        return tiny_chat(Path(source) / EMBEDDED)
    folder, gguf = located(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf)
    except Exception as error:                               # of any type: transformers, tokenizers, network
        raise UserError(f"{source} has no tokenizer that can be read: {one_line(error)}") from None
    try:
        stops = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError as error:
        if "does not appear to have a file" not in str(error):                  # a model need not have one
            raise UserError(f"{source} has stop tokens that cannot be read: {one_line(error)}") from None
        stops = None
    try:
        return template_chat(tokenizer, instruction,
                             {*(stops if isinstance(stops, list) else [stops])} - {None})
    except (UserError, TemplateError) as error:
        raise UserError(f"{source}: {one_line(error)}") from None


# Weights ----------------------------------------------------------------------------------------------------

def load_config(source: str) -> PreTrainedConfig:
    """Return the configuration of a model's text part.

    Raises: UserError if there is none, or one that model.py does not compute.
    """
    folder, gguf = located(source)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **gguf)
    except Exception as error:                       # transformers raises what it likes, ImportError included
        where = "" if Path(source).exists() else "no such folder, and the hub gives "
        raise UserError(f"{source}: {where}no configuration that can be read: {one_line(error)}") from None
    if config.model_type == "gemma3":
        config = config.text_config
    try:
        check_config(config)
    except (UserError, TypeError, AttributeError, ZeroDivisionError) as error:       # of values of any kind
        raise UserError(f"{source}/config.json: {one_line(error)}") from None
    return config


def load_model(source: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """Read a model from a folder, a GGUF file or the hub.

    Raises: UserError if there is none, or none that model.py computes.
    """
    config, (folder, gguf) = load_config(source), located(source)
    try:
        theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True,
                                                            trust_remote_code=False,
                                                            output_loading_info=True, **gguf)
    except Exception as error:                                                   # of any type, as above
        raise UserError(f"{source} is not a model that loads: {one_line(error)}") from None
    if info["missing_keys"]:                         # transformers would leave them random
        raise UserError(f"{source} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    weights = {name.replace("model.language_model.", "model."): tensor for name, tensor in
               theirs.state_dict().items() if "vision_tower" not in name and "multi_modal" not in name}
    with torch.device("meta"):
        model = Transformer(config, seed=None)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(f"{source}: weights that model.py does not know: {one_line(error)}") from None
    model.tie()
    if theirs.config.model_type == "gemma3":
        print(f"{source} also sees images: only its language model is loaded")
    return model.to(device)


def save_model(model: Transformer, folder: str) -> None:
    """Write config.json and model.safetensors as transformers and vLLM read them, adapters merged."""
    os.makedirs(folder, exist_ok=True)
    model.config.architectures = [ARCHITECTURES[model.config.model_type]]
    model.config.dtype = model.lm_head.weight.dtype
    model.config.save_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".reduce" not in name
               and ".expand" not in name}
    weights = {name.replace(".base.", "."): tensor for name, tensor in weights.items()}
    weights |= {f"{name}.weight": module.merged() for name, module in model.named_modules()
                if isinstance(module, Adapter)}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
              os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


# Both together ----------------------------------------------------------------------------------------------

def load_speaker(source: str, instruction: str = "", device: str = "cpu",
                 dtype: torch.dtype = torch.float32) -> Speaker:
    """Load a model with its chat format; `instruction` stands in front of every dialogue.

    Raises: UserError if either is missing, or if they do not fit each other.
    """
    chat, model = load_chat(source, instruction), load_model(source, device, dtype)
    V, room = model.config.vocab_size, model.config.max_position_embeddings
    if chat.vocab_size > V:
        raise UserError(f"{source}: its tokenizer has {chat.vocab_size} tokens, its model scores for {V}")
    if len(chat.head) + len(chat.post) >= room:
        raise UserError(f"{source}: the instruction alone fills its context of {room} tokens")
    return model, chat


def save_speaker(folder: Path, model: Transformer, chat: Chat) -> None:
    """Save a model with its tokenizer; the folder is whole or absent."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(model, str(partial))
    chat.save(str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


@command
def main() -> None:
    parser = Parser("Convert a model and its tokenizer into a folder.")
    parser.add_argument("source", help="a folder, a .gguf file or a hub id, which downloads it")
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    args = parser.parse_args()
    if args.folder.exists():
        raise UserError(f"{args.folder} exists: choose another folder")
    model, chat = load_speaker(args.source)
    try:
        save_speaker(args.folder, model, chat)
    except OSError as error:
        raise UserError(f"{args.folder} cannot be written: {error}") from None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{model.config.model_type}, {parameters:,} parameters, in {args.folder}/")


if __name__ == "__main__":
    main()
