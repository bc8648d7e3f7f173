"""Everything that can be set: one frozen dataclass, its presets, and command lines made from its fields.

A flag beats a preset, a preset beats a default. What stands as None here is for the task to say (`Task`).
This file imports no other file of ours; the others take what they need of it as arguments.

Run `python config.py` to print what the presets change.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

METHODS = ("base", "static", "naive", "calibrated", "human")
EMBEDDED = "tokenizer.tiktoken"         # the file that marks a folder's model as one of the embedded world's
OWN = {"sft_steps": 100, "sft_batch": 8, "sft_lr": 2e-5, "calibration_steps": 100, "train_problems": 1000,
       "prompts": 8, "lr": 1e-6, "steps": 100, "max_new_tokens": 256, "eval_every": 10, "eval_problems": 64,
       "card_dialogues": 50, "test_problems": 200}
PRESETS = {"tiny": {},
           "own": OWN,                                                # any model that is named by --policy
           "gpu": OWN | {"device": "cuda", "policy": "Qwen/Qwen2.5-0.5B-Instruct",
                         "simulator": "Qwen/Qwen2.5-1.5B-Instruct", "simulator_lora_rank": 32},
           "paper": OWN | {"device": "cuda", "policy": "google/gemma-3-4b-it", "lora_rank": 32, "lr": 1e-5,
                           "simulator": "Qwen/Qwen2.5-7B-Instruct", "simulator_lora_rank": 32}}


class UserError(Exception):
    """What a user did wrong: shown as one line, exit code 2. Any other exception shows its traceback."""


def command(main: Callable) -> Callable:
    """Make a file's `main` say a `UserError` in one line on stderr and leave with exit code 2."""
    @functools.wraps(main)
    def run(*arguments):
        try:
            return main(*arguments)
        except UserError as error:
            print(f"{Path(main.__code__.co_filename).name}: {error}", file=sys.stderr)
            sys.exit(2)
    return run


def option(default, help: str, choices=None, minimum=None, below=math.inf):
    """A field of Config that is also a command-line flag."""
    return field(default=default,
                 metadata={"help": help, "choices": choices, "minimum": minimum, "below": below})


@dataclass(frozen=True)
class Config:
    """Everything that can be set, each a flag of the same name."""
    task: str = option("math", "what the dialogues are about: NAME of a file task_NAME.py")
    method: str = option("calibrated", "which method to train, or all", choices=(*METHODS, "all"))
    preset: str = option("", "set of defaults: tiny; own (any model); gpu (24 GB); paper (80 GB) (default: "
                             "own with --policy, else tiny)", choices=tuple(PRESETS))
    policy: str = option("", "policy to start from: folder, GGUF file or hub id (default: train a tiny one)")
    simulator: str = option("", "naive simulator: the same, or http://HOST:PORT/v1#MODEL (default: "
                                "--policy, prompted, or a tiny one)")
    human: str = option("scripted", "who tests: scripted, or http://HOST:PORT/v1#MODEL for a prompted model")
    problems: str = option("", "JSONL, JSON or hf:openai/gsm8k: rows in the task's shape (default: made)")
    facts: int = option(None, "facts in a generated problem (default: the task's)", minimum=1)
    human_logs: str = option("", "JSONL of human dialogues to calibrate on (default: the scripted human's)")
    evaluate: str = option("", "score this policy against the human, train nothing")
    out: str = option("out", "folder of the run; must not exist, unless --resume")
    resume: bool = option(False, "continue the run in --out")
    seed: int = option(0, "of every random draw", minimum=0)
    device: str = option("cpu", "where the models live", choices=("cpu", "cuda", "mps"))
    precision: str = option("", "of matrix products; weights that train stay in fp32 (default: fp32; on "
                                "cuda, with other presets than tiny, bf16)", choices=("fp32", "bf16"))
    cuda_graphs: bool = option(False, "on cuda: replay the token loop of rollouts as a graph (not measured)")
    horizon: int = option(None, "assistant turns a dialogue may have, H (default: the task's)", minimum=1)
    group_size: int = option(8, "dialogues per problem, G", minimum=2)
    prompts: int = option(32, "problems per step, P", minimum=1)
    steps: int = option(80, "rollouts, each followed by its optimiser steps", minimum=1)
    minibatches: int = option(2, "optimiser steps per rollout, each on its share of the problems", minimum=1)
    lr: float = option(1e-3, "learning rate of GRPO", minimum=0)
    clip_eps: float = option(0.2, "ratios beyond 1 - eps and 1 + eps are clipped", minimum=0)
    kl_coef: float = option(0.0, "weight of the KL to the policy before training", minimum=0)
    lora_rank: int = option(0, "rank of the policy's adapters; 0 trains all weights", minimum=0)
    simulator_lora_rank: int = option(0, "rank of the simulator's adapters; 0 trains all", minimum=0)
    token_budget: int = option(4096, "tokens, padding included, of a forward and backward pass: lower it if "
                                     "memory runs out", minimum=1)
    max_new_tokens: int = option(None, "longest reply, in tokens (default: the task's)", minimum=1)
    max_failed: float = option(0.2, "share of dialogues that servers and grader may fail", minimum=0, below=1)
    warm_start: bool = option(False, "fine-tune a given --policy on scripted logs first, as the tiny one is")
    sft_steps: int = option(1600, "warm-start steps; the tiny naive simulator takes half", minimum=1)
    calibration_steps: int = option(2000, "fine-tuning steps of the simulator on human logs", minimum=1)
    sft_lr: float = option(3e-3, "learning rate of warm start and calibration", minimum=0)
    sft_batch: int = option(32, "dialogues per step of warm start and calibration", minimum=1)
    train_problems: int = option(8000, "generated problems to train on", minimum=1)
    eval_every: int = option(5, "steps between evaluations against the human", minimum=1)
    eval_problems: int = option(200, "validation problems of such an evaluation", minimum=1)
    card_dialogues: int = option(300, "held-out dialogues of the report card", minimum=1)
    test_problems: int = option(1000, "problems of the final evaluation", minimum=1)


def complete(config: Config, task) -> Config:
    """Return the configuration with the task's numbers where none were chosen."""
    return replace(config, horizon=config.horizon or task.horizon,
                   max_new_tokens=config.max_new_tokens or task.max_new_tokens,
                   facts=config.facts or next(iter(task.sizes)))


# The command line -------------------------------------------------------------------------------------------

def number(kind: type, minimum: float, below: float = math.inf) -> Callable[[str], float]:
    """Return what reads a number of a command line and refuses one that is out of range."""
    def read(text: str) -> float:
        value = kind(text)
        if not minimum <= value < below:
            limit = f"at least {minimum}" if not value >= minimum else f"below {below}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {value}")
        return value
    read.__name__ = kind.__name__                      # argparse names it: invalid int value: 'x'
    return read


class Parser(argparse.ArgumentParser):
    """A command line; what it cannot read is a `UserError`."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> None:
        raise UserError(message)

    def add_fields(self, *names: str, **others) -> None:
        """Add flags for fields of Config, with their defaults; `others` have one of their own."""
        for f in (f for f in fields(Config) if f.name in names or f.name in others):
            flag, meta, default = "--" + f.name.replace("_", "-"), f.metadata, others.get(f.name, f.default)
            if f.type is bool:
                self.add_argument(flag, action="store_true", default=default, help=meta["help"])
                continue
            kind = f.type if meta["minimum"] is None else number(f.type, meta["minimum"], meta["below"])
            shown = f.default if default is argparse.SUPPRESS else default
            text = meta["help"] if shown == f.default else meta["help"].split(" (default")[0]
            text += "" if shown in ("", None) or "(default" in text else f" (default: {shown})"
            self.add_argument(flag, type=kind, default=default, choices=meta["choices"], help=text,
                              metavar=None if meta["choices"] else f.type.__name__.upper())


def is_embedded(source: str) -> bool:
    """Whether a folder holds a model of the embedded world, which speaks its own chat format."""
    return (Path(source) / EMBEDDED).is_file()


def parse_config(argv: list[str] | None = None, description: str = "") -> Config:
    """Read a command line into a Config, or raise UserError for what cannot be used."""
    parser = Parser(description)
    parser.add_fields(**{f.name: argparse.SUPPRESS for f in fields(Config)})
    given = vars(parser.parse_args(argv))
    policy = given.get("policy") or given.get("evaluate")
    preset = given.get("preset") or ("own" if policy and not is_embedded(policy) else "tiny")
    defaults = PRESETS[preset] | ({"policy": ""} if "evaluate" in given else {})
    config = Config(**defaults | given | {"preset": preset})
    if config.precision:
        return config
    return replace(config, precision="bf16" if config.device == "cuda" and preset != "tiny" else "fp32")


@command
def main() -> None:
    for name, overrides in PRESETS.items():
        print(f"{name:6s}", ", ".join(f"{field} {value}" for field, value in overrides.items())
              or "the defaults")


if __name__ == "__main__":
    main()
