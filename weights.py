"""Models as files: Hugging Face checkpoints in and out, and the checkpoints of a run.

A model is named by its folder, by a GGUF file, or by its id on the Hugging Face hub, which downloads it:

    load_model("out/policy")    load_model("smollm2.gguf")    load_model("Qwen/Qwen2.5-0.5B-Instruct")

transformers reads configuration and weights (sharded, quantised to GGUF, or inside a multimodal checkpoint),
and our own transformer computes with them. What it does not compute is refused by name before any weight is
read. `save_model` writes what transformers and vLLM read.

Run `python weights.py SOURCE FOLDER` to convert a model and its tokenizer, a GGUF file for instance, into a
folder of safetensors.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from chat import Chat, load_chat, located, one_line
from lora import Adapter, trainable
from model import Transformer, check_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "gemma3_text": "Gemma3ForCausalLM"}
Speaker = tuple[Transformer, Chat]
logging.disable_progress_bar()


def load_config(source: str) -> PreTrainedConfig:
    """Return the configuration of a model's text part.

    Raises: ValueError if there is none, or one that model.py does not compute.
    """
    folder, gguf = located(source)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **gguf)
    except Exception as error:                       # transformers raises what it likes, ImportError included
        where = "" if Path(source).exists() else "no such folder, and the hub gives "
        raise ValueError(f"{source}: {where}no configuration that can be read: {one_line(error)}") from None
    if config.model_type == "gemma3":
        config = config.text_config
    try:
        check_config(config)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{source}/config.json: {one_line(error)}") from None
    return config


def load_model(source: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """Read a model from a folder, a GGUF file or the hub.

    Raises: ValueError if there is none, or none that model.py computes.
    """
    config, (folder, gguf) = load_config(source), located(source)
    try:
        theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True,
                                                            trust_remote_code=False,
                                                            output_loading_info=True, **gguf)
    except Exception as error:
        raise ValueError(f"{source} is not a model that loads: {one_line(error)}") from None
    if info["missing_keys"]:                         # transformers would leave them random
        raise ValueError(f"{source} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    weights = {name.replace("model.language_model.", "model."): tensor for name, tensor in
               theirs.state_dict().items() if "vision_tower" not in name and "multi_modal" not in name}
    with torch.device("meta"):
        model = Transformer(config, seed=None)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{source}: weights that model.py does not know: {one_line(error)}") from None
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


def load_speaker(source: str, instruction: str = "", device: str = "cpu",
                 dtype: torch.dtype = torch.float32) -> Speaker:
    """Load a model with its chat format; `instruction` stands in front of every dialogue.

    Raises: ValueError if either is missing, or if they do not fit each other.
    """
    chat, model = load_chat(source, instruction), load_model(source, device, dtype)
    V, room = model.config.vocab_size, model.config.max_position_embeddings
    if chat.vocab_size > V:
        raise ValueError(f"{source}: its tokenizer has {chat.vocab_size} tokens, its model scores for {V}")
    if len(chat.head) + len(chat.post) >= room:
        raise ValueError(f"{source}: the instruction alone fills its context of {room} tokens")
    return model, chat


def save_speaker(folder: Path, model: Transformer, chat: Chat) -> None:
    """Save a model with its tokenizer; the folder is whole or absent."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(model, str(partial))
    chat.save(str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def save_checkpoint(path: Path, step: int, model: Transformer, optimiser: torch.optim.Optimizer) -> None:
    """Write what trains and its optimiser state: draws are keyed by the step, so that is all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, parameter in enumerate(trainable(model)):
        tensors |= {f"{i}.{name}": value.detach().cpu().contiguous()
                    for name, value in optimiser.state[parameter].items()}
        tensors[f"{i}.weight"] = parameter.detach().cpu().contiguous()
    save_file(tensors, str(path) + ".partial", metadata={"step": str(step)})
    os.replace(str(path) + ".partial", path)


@torch.no_grad()
def load_checkpoint(path: Path, model: Transformer, optimiser: torch.optim.Optimizer) -> int:
    """Read what `save_checkpoint` wrote into model and optimiser and return its step; 0 if there is none.

    Raises: ValueError if the file is not one that `save_checkpoint` wrote for such a model.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            step = int(file.metadata()["step"])
        for i, parameter in enumerate(trainable(model)):
            if tensors[f"{i}.weight"].shape != parameter.shape:
                raise ValueError(f"weight {i} has another shape")
            parameter.copy_(tensors[f"{i}.weight"])
            optimiser.state[parameter] = {name: tensors[f"{i}.{name}"].to(parameter.device)
                                          for name in ("step", "exp_avg", "exp_avg_sq")}
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} is not a checkpoint of this model: {error}") from None
    return step


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"weights.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a model and its tokenizer into a folder.",
                                     allow_abbrev=False)
    parser.add_argument("source", help="a folder, a .gguf file or a hub id, which downloads it")
    parser.add_argument("folder", help="folder to write, which must not exist")
    parser.error = fail
    args = parser.parse_args()
    try:
        if Path(args.folder).exists():
            raise ValueError(f"{args.folder} exists: choose another folder")
        model, chat = load_speaker(args.source)
        save_speaker(Path(args.folder), model, chat)
    except (ValueError, OSError) as error:
        fail(str(error))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{model.config.model_type}, {parameters:,} parameters, in {args.folder}/")


if __name__ == "__main__":
    main()
