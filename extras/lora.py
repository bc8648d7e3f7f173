"""Low-rank adapters (LoRA, arXiv 2106.09685): train a small correction where the whole model does not fit.

`add_adapters` freezes a model and puts a trainable correction of low rank beside every linear layer of its
blocks. `reference_of` is then the same weights with the adapters off.

Run `python -m extras.lora` to count what is left to train.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Transformer, tiny_config, trainable


class Adapter(nn.Module):
    """A frozen linear layer and a trainable correction of low rank to it.

    The correction starts at zero: `expand` is zero, `reduce` is not.

    Source: LoRA, arXiv 2106.09685, equation 3 with alpha = 2 rank.
    """
    SCALE = 2.0                                                                          # alpha / rank

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        reduce = torch.randn(rank, base.in_features, generator=generator) / base.in_features ** 0.5
        self.base = base
        self.reduce = nn.Parameter(reduce.to(base.weight.device))                        # (rank, in), fp32
        self.expand = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        correction = F.linear(F.linear(x, self.reduce.to(x.dtype)), self.expand.to(x.dtype))
        return self.base(x) + self.SCALE * correction

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight of a single linear layer that computes the same."""
        return (self.base.weight + self.SCALE * self.expand @ self.reduce).to(self.base.weight.dtype)


def add_adapters(model: Transformer, rank: int, seed: int) -> None:
    """Freeze a model and put an adapter around every linear layer of its blocks."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapter(child, rank, generator))


def reference_of(policy: Transformer) -> Transformer:
    """Return a policy as it is before training: a copy with its adapters off that shares frozen weights."""
    shared = {id(parameter): parameter for parameter in policy.parameters() if not parameter.requires_grad}
    reference = copy.deepcopy(policy, shared).requires_grad_(False)
    for module in list(reference.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Adapter):
                setattr(module, name, child.base)
    return reference


def main() -> None:
    model = Transformer(tiny_config(vocab_size=700))
    everything = sum(parameter.numel() for parameter in trainable(model))
    for rank in (1, 4, 16):
        adapted = copy.deepcopy(model)
        add_adapters(adapted, rank, seed=0)
        left = sum(parameter.numel() for parameter in trainable(adapted))
        print(f"rank {rank:2d}: {left:7,} of {everything:,} parameters train")


if __name__ == "__main__":
    main()
