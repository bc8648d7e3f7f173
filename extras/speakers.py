"""The models of a run: given or made, warm-started, calibrated, and kept in its folder.

A *given* model is Hugging Face's, and is told what to do by an instruction in front of every dialogue: the
policy to ask for what it needs, the simulator to be a user. The *embedded* ones have 0.1 M parameters, know
no instruction, and are fine-tuned from nothing instead. Everything after that is the same code for both.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from align_sim import calibrate, naive_simulator
from chat import tiny_chat
from config import Config, is_embedded
from extras.endpoint import EndpointUser, is_endpoint
from extras.hf import Speaker, load_speaker, save_speaker
from extras.lora import add_adapters
from extras.records import log_losses
from logs import Data, warm_start_dialogues
from model import Transformer, tiny_config
from sampling import draw_key
from sft import sft
from simulator import KeyboardUser, ModelUser, ScriptedUser
from tasks import Task


def kept(config: Config, name: str, phase: str, make: Callable[[], tuple[Speaker, list[float]]]) -> str:
    """Return the folder of that name in the run's; if there is no model in it yet, `make` one for it."""
    folder = Path(config.out) / name
    if not folder.exists():
        speaker, losses = make()
        log_losses(Path(config.out), phase, losses)
        save_speaker(folder, *speaker)
    return str(folder)


def frozen_dtype(config: Config) -> torch.dtype:
    """Return what weights that do not train are held in."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def warm_start(config: Config, data: Data) -> tuple[Speaker, list[float]]:
    """Return the policy fine-tuned on assistant turns, and the losses.

    The policy is the given one or, if there is none, a tiny one from nothing.
    """
    if config.policy:
        model, chat = load_speaker(config.policy, data.task.policy_instruction, config.device)
    else:
        chat = tiny_chat()
        model = Transformer(tiny_config(vocab_size=chat.vocab_size),
                            draw_key(config.seed, "policy weights")).to(config.device)
    examples = [chat.render(messages)
                for messages in warm_start_dialogues(data.task, data.train, config.seed)]
    losses = sft(model, examples, steps=config.sft_steps, batch=config.sft_batch, lr=config.sft_lr,
                 seed=config.seed, token_budget=config.token_budget, precision=config.precision,
                 phase="warm start of the policy")
    return (model, chat), losses


def base_policy(config: Config, data: Data) -> Speaker:
    """Return the policy before reinforcement learning: the given one, or one warm-started."""
    source = config.evaluate or config.policy
    if not source or config.warm_start and not config.evaluate:
        source = kept(config, "base/policy", "policy", lambda: warm_start(config, data))
    dtype = frozen_dtype(config) if config.lora_rank else torch.float32
    return load_speaker(source, data.task.policy_instruction, config.device, dtype)


def load_simulators(config: Config, data: Data, methods: tuple[str, ...]) -> dict[str, Speaker]:
    """Return the simulators that the methods need: naive, given or tiny, and calibrated, made from it.

    With adapters, what does not train of the calibrated one is frozen, in bf16 where the run computes in it.
    """
    source, instruction = config.simulator, data.task.simulator_instruction
    if not {"naive", "calibrated"} & set(methods) or is_endpoint(source):
        return {}

    def make_naive() -> tuple[Speaker, list[float]]:
        chat = tiny_chat()
        model, losses = naive_simulator(data.task, chat, data.train, steps=max(1, config.sft_steps // 2),
                                        batch=config.sft_batch, lr=config.sft_lr, seed=config.seed,
                                        device=config.device)
        return (model, chat), losses

    def make_calibrated() -> tuple[Speaker, list[float]]:
        rank = config.simulator_lora_rank
        model, chat = load_speaker(source, instruction, config.device,
                                   frozen_dtype(config) if rank else torch.float32)
        if rank:
            add_adapters(model, rank, draw_key(config.seed, "simulator adapters"))
        return (model, chat), calibrate(model, chat, data.logs, steps=config.calibration_steps,
                                        batch=config.sft_batch, lr=config.sft_lr, seed=config.seed,
                                        token_budget=config.token_budget, precision=config.precision,
                                        stop_early=not data.scripted)

    if not source and config.policy and not is_embedded(config.policy):
        source = config.policy
    source = source or kept(config, "simulator_naive", "naive", make_naive)
    folders = {"naive": source}
    if "calibrated" in methods:
        folders["calibrated"] = kept(config, "simulator_calibrated", "calibration", make_calibrated)
    return {name: load_speaker(folder, instruction, config.device, frozen_dtype(config))
            for name, folder in folders.items()}


def find_simulator(policy: str, name: str) -> str:
    """Return the folder of a run's simulator from that of its policy: out/policy or out/METHOD/policy."""
    candidates = [run / f"simulator_{name}" for run in Path(policy).resolve().parents[:2]]
    return str(next((folder for folder in candidates if folder.is_dir()), candidates[0]))


def named_user(name: str, source: str, policy: str, task: Task, device: str, max_new_tokens: int):
    """Return the user that `python rollout.py --user NAME` stands for: scripted, me, naive or calibrated.

    A simulator without a `source` is that of the policy's run.
    """
    if name in ("scripted", "me"):
        return ScriptedUser(task.human) if name == "scripted" else KeyboardUser()
    if is_endpoint(source):
        return EndpointUser(source, task.simulator_instruction, max_new_tokens=max_new_tokens)
    speaker = load_speaker(source or find_simulator(policy, name), task.simulator_instruction, device)
    return ModelUser(*speaker, max_new_tokens)
