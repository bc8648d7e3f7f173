"""The models that speak: policy and simulators, given or made, warm-started, calibrated, and kept on disk.

A *given* model is Hugging Face's, and is told what to do by an instruction in front of every dialogue: the
policy to ask for what it needs, the simulator to be a user. The *embedded* ones have 0.1 M parameters, know
no instruction, and are fine-tuned from nothing instead. Everything after that is the same code for both.

Run `python speakers.py` to read the instructions.
"""

import random
from collections.abc import Callable
from pathlib import Path

import torch

from align_sim import calibrate, naive_simulator
from chat import is_embedded, tiny_chat
from config import Config
from data import Data
from endpoint import is_endpoint
from logs import told_at_once, write_logs
from lora import add_adapters
from model import Transformer, tiny_config
from records import log_losses
from rollout import ASSISTANT
from sampling import draw_key
from sft import sft
from simulator import NAIVE_USER, human
from weights import Speaker, load_speaker, save_speaker


def kept(folder: Path, make: Callable[[], Speaker]) -> str:
    """Return `folder`; if there is no model in it yet, `make` one and keep it there."""
    if not folder.exists():
        save_speaker(folder, *make())
    return str(folder)


def warm_start(config: Config, data: Data) -> tuple[Speaker, list[float]]:
    """Return the policy fine-tuned on assistant turns, and the losses.

    Three fifths are the scripted human's logs with a mediocre assistant, two fifths fully specified problems
    with right answers: it can do the sum; what it lacks is the dialogue. The policy is the given one or, if
    there is none, a tiny one from nothing.
    """
    if config.policy:
        model, chat = load_speaker(config.policy, ASSISTANT, config.device)
    else:
        chat = tiny_chat()
        model = Transformer(tiny_config(vocab_size=chat.vocab_size),
                            draw_key(config.seed, "policy weights")).to(config.device)
    rng = random.Random(draw_key(config.seed, "told at once"))
    shown = [told_at_once(problem, rng) for problem in data.train]
    logged = [log["messages"] for log in write_logs(data.train, human, config.seed)]
    cut = len(logged) * 3 // 5
    examples = [chat.render(messages) for messages in logged[:cut] + shown[cut:]]
    losses = sft(model, examples, steps=config.sft_steps, batch=config.sft_batch, lr=config.sft_lr,
                 seed=config.seed, token_budget=config.token_budget, precision=config.precision,
                 title="warm start of the policy")
    return (model, chat), losses


def naive_speaker(config: Config, data: Data) -> tuple[Speaker, list[float]]:
    """Return the tiny over-helpful simulator, and the losses."""
    chat, steps = tiny_chat(), max(1, config.sft_steps // 2)
    model, losses = naive_simulator(chat, data.train, steps=steps, batch=config.sft_batch, lr=config.sft_lr,
                                    seed=config.seed, device=config.device)
    return (model, chat), losses


def frozen_dtype(config: Config) -> torch.dtype:
    """Return what weights that do not train are held in."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def calibrated_speaker(config: Config, data: Data, naive: str) -> tuple[Speaker, list[float]]:
    """Return the naive simulator after fine-tuning on human logs, and the losses.

    With adapters, the rest of it stays frozen, in bf16 where the run computes in bf16.
    """
    rank = config.simulator_lora_rank
    dtype = frozen_dtype(config) if rank else torch.float32
    model, chat = load_speaker(naive, NAIVE_USER, config.device, dtype)
    if rank:
        add_adapters(model, rank, draw_key(config.seed, "simulator adapters"))
    losses = calibrate(model, chat, data.logs, steps=config.calibration_steps, batch=config.sft_batch,
                       lr=config.sft_lr, seed=config.seed, token_budget=config.token_budget,
                       precision=config.precision, stop_early=not data.scripted)
    return (model, chat), losses


def base_policy(config: Config, data: Data) -> Speaker:
    """Return the policy before reinforcement learning: the given one, or one warm-started."""
    source, out = config.evaluate or config.policy, Path(config.out)
    if not source or config.warm_start and not config.evaluate:
        def make() -> Speaker:
            speaker, losses = warm_start(config, data)
            log_losses(out, "policy", losses)
            return speaker
        source = kept(out / "base" / "policy", make)
    dtype = frozen_dtype(config) if config.lora_rank else torch.float32
    return load_speaker(source, ASSISTANT, config.device, dtype)


def load_simulators(config: Config, data: Data, methods: tuple[str, ...]) -> dict[str, Speaker]:
    """Return the simulators that the methods need: naive, given or tiny, and calibrated, made from it."""
    out, source = Path(config.out), config.simulator
    if not {"naive", "calibrated"} & set(methods) or is_endpoint(source):
        return {}

    def make(phase: str, speaker: Speaker, losses: list[float]) -> Speaker:
        log_losses(out, phase, losses)
        return speaker

    if not source and config.policy and not is_embedded(config.policy):
        source = config.policy
    source = source or kept(out / "simulator_naive", lambda: make("naive", *naive_speaker(config, data)))
    folders = {"naive": source}
    if "calibrated" in methods:
        folders["calibrated"] = kept(out / "simulator_calibrated",
                                     lambda: make("calibration", *calibrated_speaker(config, data, source)))
    return {name: load_speaker(folder, NAIVE_USER, config.device, frozen_dtype(config))
            for name, folder in folders.items()}


def main() -> None:
    print(f"The policy is told:\n\n{ASSISTANT}\n\nThe naive simulator is told:\n\n{NAIVE_USER}")


if __name__ == "__main__":
    main()
