"""What a run is given: checked before anything is written, then read."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from config import Config, UserError
from extras.endpoint import EndpointUser, is_endpoint
from extras.hf import load_config
from extras.readers import read_logs, read_problems
from logs import Data, make_data
from tasks import Task


def refuse_another_run(config: Config) -> None:
    """Raise UserError if --resume would continue something else than this run; only --steps may grow."""
    out, path = Path(config.out), Path(config.out) / "config.json"
    if not path.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is not a run that can be resumed: it has no config.json")
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(f"{path} cannot be read, so the run cannot be resumed") from None
    free = ("resume", "out", "steps", "token_budget", "cuda_graphs")      # they change rounding at most
    changed = [name for name, value in asdict(config).items() if name not in free
               and before.get(name) != value]
    if changed:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        raise UserError(f"{out} was started with another {flags}: resume it with the same")
    if before.get("steps", 0) > config.steps:
        raise UserError(f"{out} was started with --steps {before['steps']}: resume it with as many or more")


def check_inputs(config: Config) -> None:
    """Raise UserError for what cannot work, before anything is written."""
    if Path(config.out).exists() and not config.resume:
        raise UserError(f"{config.out} exists: choose another --out, or --resume to continue it")
    if config.device != "cpu" and not getattr(torch, config.device).is_available():
        raise UserError(f"--device {config.device}: this PyTorch finds none")
    if config.cuda_graphs and config.device != "cuda":
        raise UserError("--cuda-graphs is for --device cuda")
    if config.evaluate and config.policy:
        raise UserError("give --evaluate or --policy, not both: either names the policy")
    if config.warm_start and not config.policy:
        raise UserError("--warm-start is for a given --policy; the tiny one is warm-started anyway")
    if is_endpoint(config.simulator) and config.method in ("calibrated", "all"):
        raise UserError(f"--method {config.method} fine-tunes the simulator: it cannot be an endpoint")
    if config.human != "scripted" and not is_endpoint(config.human):
        raise UserError(f"--human must be scripted or http://HOST:PORT/v1#MODEL, got {config.human}")
    refuse_another_run(config)
    for address in filter(is_endpoint, (config.simulator, config.human)):
        EndpointUser(address, "").check()
    for source in filter(None, (config.evaluate or config.policy, config.simulator)):
        if not is_endpoint(source):
            load_config(source)


def load_data(config: Config, task: Task) -> Data:
    """Read what the configuration names, and make the rest.

    Raises: UserError naming the file and the line of what is wrong.
    """
    problems = read_problems(config.problems, task) if config.problems else []
    return make_data(task, config, problems, read_logs(config.human_logs) if config.human_logs else [])
