"""The physical floor: how long a computation must take on this machine at the least.

Memory bandwidth and the rate of matrix products are measured, not looked up. A rollout can take no less time
than reading the weights and the cache at that bandwidth, or multiplying at that rate. A model that fits a
CPU's caches may still go below it.

Run `python -m extras.floor` to measure this machine.
"""

import statistics
import time
from collections.abc import Callable

import torch

from cache import head_size
from model import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bandwidth(device: torch.device) -> float:
    """Return how many bytes per second can be read from memory."""
    x = torch.ones(2 ** 28, device=device)                                       # 1 GiB: beyond every cache
    return 4 * x.nbytes / statistics.median(seconds(lambda: [x.sum() for _ in range(4)], device)
                                            for _ in range(5))


def multiplications(dtype: torch.dtype, device: torch.device) -> float:
    """Return operations per second of a large matrix product; a multiplication and an addition are two."""
    n = 2048 if device.type == "cpu" else 8192
    x = torch.randn(n, n, device=device).to(dtype)                              # ones would draw less power
    return 2 * n ** 3 / statistics.median(seconds(lambda: x @ x, device) for _ in range(7))


def linear_weights(model: Transformer) -> tuple[int, int]:
    """Return how many weights the matrices of the blocks have, and how many the head."""
    blocks = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    return blocks, model.lm_head.weight.numel()


def rollout_floor(model: Transformer, openings: list, messages: list, new: int, precision: str, reads: float,
                  rate: float) -> float:
    """Return the least seconds of a rollout with `new` tokens per reply: in every pass arithmetic or memory,
    whichever takes longer, at `rate` operations and `reads` bytes per second.

    A pass reads all matrices. The first pass of a turn takes its text and the last sampled token, each other
    pass one token per row.
    """
    blocks, head = linear_weights(model)
    config, size = model.config, DTYPES[precision].itemsize
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * size      # per token
    weights, B, total, length = (blocks + head) * size / reads, len(openings), 0.0, 0
    for turn in [openings, *messages[:-1]]:
        unread = sum(map(len, turn)) + (B if length else 0)
        length += unread
        total += max(2 * (blocks * unread + head * B) / rate, weights)
        for _ in range(new - 1):
            length += B
            total += max(2 * (blocks + head) * B / rate, weights + length * kv / reads)
    return total


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device}: {bandwidth(device) / 1e9:.0f} GB/s", *(
        f"{multiplications(dtype, device) / 1e9:,.0f} GFLOP/s in {precision}"
        for precision, dtype in DTYPES.items()), sep=", ")


if __name__ == "__main__":
    main()
