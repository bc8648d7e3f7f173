"""The checkpoint of a run: what trains and the state of its optimiser, in one safetensors file.

Random draws are keyed by the step, so weights, moments and the number of the step are all that a run needs to
continue to the bit. Of a model with adapters only the adapters are in the file.

Run `python -m extras.checkpoint` to see what such a file holds.
"""

import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from config import UserError
from model import Transformer, tiny_config, trainable

MOMENTS = ("step", "exp_avg", "exp_avg_sq")             # AdamW's state of a parameter


def save_checkpoint(path: Path, step: int, model: Transformer, optimiser: torch.optim.Optimizer) -> None:
    """Write what trains and its optimiser state; the file is whole or as it was."""
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

    Raises: UserError if the file is not one that `save_checkpoint` wrote for such a model.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            step = int(file.metadata()["step"])
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:    # damaged, or another file
        raise UserError(f"{path} is not a checkpoint of this model: {error}") from None
    for i, parameter in enumerate(trainable(model)):
        lacking = {f"{i}.{name}" for name in ("weight", *MOMENTS)} - tensors.keys()
        if lacking or tensors[f"{i}.weight"].shape != parameter.shape:
            what = f"it lacks {min(lacking)}" if lacking else f"weight {i} has another shape"
            raise UserError(f"{path} is not a checkpoint of this model: {what}")
        parameter.copy_(tensors[f"{i}.weight"])
        optimiser.state[parameter] = {name: tensors[f"{i}.{name}"].to(parameter.device) for name in MOMENTS}
    return step


def main() -> None:
    """Save a small model after one step and list what the file holds of its first parameter."""
    model = Transformer(tiny_config(vocab_size=50))
    optimiser = torch.optim.AdamW(trainable(model), lr=1e-3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimiser.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        save_checkpoint(path, 1, model, optimiser)
        print(f"{len(trainable(model))} parameters, {path.stat().st_size:,} bytes, the first of them:")
        with safe_open(str(path), framework="pt") as file:
            for name in ("0.weight", *(f"0.{moment}" for moment in MOMENTS)):
                print(f"{name:14s} {tuple(file.get_tensor(name).shape)}")


if __name__ == "__main__":
    main()
