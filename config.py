"""Everything that can be set: one frozen dataclass, its presets, and the command line made from its fields.

A preset is a set of defaults: a flag beats a preset, a preset beats a default.

Run `python config.py` to print what the presets change.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field, fields, replace

from align_sim import CALIBRATION_STEPS, OWN_BATCH, OWN_LR, OWN_STEPS, SFT_BATCH, SFT_LR, SFT_STEPS
from chat import is_embedded
from logprobs import TOKEN_BUDGET
from plot import METHODS
from rollout import HORIZON, MAX_NEW_TOKENS

OWN = {"sft_steps": OWN_STEPS, "sft_batch": OWN_BATCH, "sft_lr": OWN_LR,
       "calibration_steps": OWN_STEPS, "train_problems": 1000, "prompts": 8, "lr": 1e-6, "steps": 100,
       "max_new_tokens": 256, "eval_every": 10, "eval_problems": 64,
       "card_dialogues": 50, "test_problems": 200}
PRESETS = {"tiny": {},
           "own": OWN,                                                # any model that is named by --policy
           "gpu": OWN | {"device": "cuda", "policy": "Qwen/Qwen2.5-0.5B-Instruct",
                         "simulator": "Qwen/Qwen2.5-1.5B-Instruct", "simulator_lora_rank": 32},
           "paper": OWN | {"device": "cuda", "policy": "google/gemma-3-4b-it", "lora_rank": 32, "lr": 1e-5,
                           "simulator": "Qwen/Qwen2.5-7B-Instruct", "simulator_lora_rank": 32}}


def option(default, help: str, choices=None, minimum=None):
    """A field of Config that is also a command-line flag."""
    return field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum})


@dataclass(frozen=True)
class Config:
    """Everything that can be set, each a flag of the same name."""
    task: str = option("math", "what the dialogues are about", choices=("math",))
    method: str = option("calibrated", "which method to train, or all", choices=(*METHODS, "all"))
    preset: str = option("", "a set of defaults: tiny; own, any model of yours; gpu, 24 GB; paper, 80 GB "
                             "(default: tiny, with --policy own)", choices=tuple(PRESETS))
    policy: str = option("", "policy to start from: folder, GGUF file or hub id (default: train a tiny one)")
    simulator: str = option("", "naive simulator: the same, or http://HOST:PORT/v1#MODEL (default: --policy, "
                                "prompted, or a tiny one)")
    human: str = option("scripted", "who tests: scripted, or http://HOST:PORT/v1#MODEL for a prompted model")
    problems: str = option("", "JSONL or JSON of problems in GSM8K's or MATH's shape, or hf:openai/gsm8k "
                               "(default: generated)")
    facts: int = option(3, "facts a generated problem has, 2 or 3", choices=(2, 3))
    human_logs: str = option("", "JSONL of human dialogues to calibrate on (default: the scripted human's)")
    evaluate: str = option("", "score this policy against the human, train nothing")
    out: str = option("out", "folder of the run; must not exist, unless --resume")
    resume: bool = option(False, "continue the run in --out")
    seed: int = option(0, "of every random draw", minimum=0)
    device: str = option("cpu", "where the models live", choices=("cpu", "cuda", "mps"))
    precision: str = option("", "bf16 multiplies matrices in bf16, weights that train stay in fp32 "
                                "(default: fp32; on cuda, with other presets than tiny, bf16)",
                            choices=("fp32", "bf16"))
    cuda_graphs: bool = option(False, "on cuda: replay the token loop of rollouts as a graph (not measured)")
    horizon: int = option(HORIZON, "assistant turns a dialogue may have, H", minimum=1)
    group_size: int = option(8, "dialogues a problem, G", minimum=2)
    prompts: int = option(32, "problems a step, P", minimum=1)
    steps: int = option(80, "rollouts, each followed by its optimiser steps", minimum=1)
    minibatches: int = option(2, "optimiser steps a rollout, each on its own share of the problems",
                              minimum=1)
    lr: float = option(1e-3, "learning rate of GRPO", minimum=0)
    clip_eps: float = option(0.2, "ratios beyond 1 - eps and 1 + eps are clipped", minimum=0)
    kl_coef: float = option(0.0, "weight of the KL to the policy before training", minimum=0)
    lora_rank: int = option(0, "rank of the policy's adapters; 0 trains all weights", minimum=0)
    simulator_lora_rank: int = option(0, "rank of the simulator's adapters in calibration; 0 trains all",
                                      minimum=0)
    token_budget: int = option(TOKEN_BUDGET, "tokens, padding included, of a forward and backward pass: "
                                             "lower it if memory runs out", minimum=1)
    max_new_tokens: int = option(MAX_NEW_TOKENS, "tokens a reply may have", minimum=1)
    max_failed: float = option(0.2, "share of a step's dialogues that servers and grader may fail", minimum=0)
    warm_start: bool = option(False, "fine-tune a given --policy first, as the tiny one is: on the "
                                     "scripted human's logs and worked answers")
    sft_steps: int = option(SFT_STEPS, "warm-start steps of the policy; the tiny naive simulator takes half",
                            minimum=1)
    calibration_steps: int = option(CALIBRATION_STEPS, "fine-tuning steps of the simulator on human logs",
                                    minimum=1)
    sft_lr: float = option(SFT_LR, "learning rate of warm start and calibration", minimum=0)
    sft_batch: int = option(SFT_BATCH, "dialogues a step of warm start and calibration", minimum=1)
    train_problems: int = option(8000, "generated problems to train on", minimum=1)
    eval_every: int = option(5, "steps between evaluations against the human", minimum=1)
    eval_problems: int = option(200, "validation problems of such an evaluation", minimum=1)
    card_dialogues: int = option(300, "held-out dialogues of the report card", minimum=1)
    test_problems: int = option(1000, "problems of the final evaluation", minimum=1)


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_config(argv: list[str] | None = None, description: str = "") -> Config:
    """Read the command line. A wrong flag or value is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    for f in fields(Config):
        flag, meta = "--" + f.name.replace("_", "-"), f.metadata
        if f.type is bool:
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=meta["help"])
        else:
            shown = meta["help"] + (f" (default: {f.default})" if f.default != "" else "")
            parser.add_argument(flag, type=f.type, default=argparse.SUPPRESS, choices=meta["choices"],
                                help=shown, metavar=None if meta["choices"] else f.type.__name__.upper())
    given = vars(parser.parse_args(argv))
    policy = given.get("policy") or given.get("evaluate")
    preset = given.get("preset") or ("own" if policy and not is_embedded(policy) else "tiny")
    defaults = PRESETS[preset] | ({"policy": ""} if "evaluate" in given else {})
    config = Config(**defaults | given | {"preset": preset})
    if not config.precision:
        config = replace(config, precision="bf16" if config.device == "cuda" and preset != "tiny" else "fp32")
    for f in fields(Config):
        value, minimum = getattr(config, f.name), f.metadata["minimum"]
        if minimum is not None and not (minimum <= value < math.inf):
            fail(f"--{f.name.replace('_', '-')} must be at least {minimum}, got {value}")
    if config.max_failed >= 1:
        fail(f"--max-failed must be below 1, got {config.max_failed}")
    return config


def main() -> None:
    for name, overrides in PRESETS.items():
        print(f"{name:6s}", ", ".join(f"{field} {value}" for field, value in overrides.items())
              or "the defaults")


if __name__ == "__main__":
    main()
