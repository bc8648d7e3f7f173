"""The sampler: the next token and its log-probability in one pass.

`sample` applies the temperature, draws the token and computes its log-probability together. Four decisions
matter:

1. *Randomness is a function, not a state.* The uniform number behind a token is a hash of (seed, phase, step,
   problem, sample, speaker, position). Equal logits give equal draws whoever shares the batch, nothing
   repeats between steps or speakers, and a run can be resumed anywhere.
2. *Inverse CDF on two levels.* One uniform number u per row picks a block of the vocabulary, and where u lies
   in the block's interval of the CDF picks the token, so one random number per row is enough. There is no
   top-k or top-p: the recorded log-probability is that of the distribution that is trained, and the first
   importance ratio after a rollout is 1.
3. *Memory is the cost.* At V = 49,152 a row is 192 KiB, and time goes into moving it. The CPU takes a few
   rows at a time, which stay in its cache. The GPU reads the logits once, keeps the maximum and the sum of
   every block, and reads the drawn block again: p(token) = p(block) p(token | block).
4. *Two implementations, one definition.* `sample_torch` is the one to read; `sample_triton` runs where logits
   are on a GPU. Weights are exponentials in fp32 (fp64 for fp64 logits), running sums are in fp64, so both
   draw the same token unless u is within 1e-6 of a boundary of the CDF.

Run `python sampling.py` to compare frequencies with probabilities.

Shapes: B rows, V vocabulary, blocks = ceil(V / BLOCK).
"""

from __future__ import annotations                      # so that kernels may name tl where triton is absent

from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

try:
    import triton                                                   # comes with CUDA builds of PyTorch
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 128                      # tokens per block of the vocabulary
CHUNK = 2 ** 19                  # logits that `sample_torch` takes at a time: 2 MiB in fp32 stay in cache
LAST = 1 - 2 ** -24              # the greatest number below 1 in fp32
TILE = 32                        # blocks that one GPU program sums
jit = triton.jit if triton else lambda kernel: kernel


def draw_key(*parts) -> int:
    """Return a 63-bit key for a stream of draws: draw_key(seed, "train", step, problem, sample, "policy")."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def uniform(draw_keys: Tensor, positions: Tensor) -> Tensor:
    """Return a number in (0, 1) for every draw key at its position: a hash with 24 random bits.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping int64 arithmetic.
    """
    x = draw_keys + (positions + 1) * -7046029254386353131                         # 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687                       # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685                      # 0x94D049BB133111EB
    x = x ^ (x >> 31 & 0x1FFFFFFFF)
    u = ((x >> 40 & 0xFFFFFF).float() + 0.5) / 2 ** 24
    return u.clamp(max=LAST)                                    # fp32 would round the greatest value up to 1


def weigh(logits: Tensor, temperature: float) -> Tensor:
    """Return the weight of every token at temperature, in fp32 at least: its probability times some factor
    that is the same for the whole row.

    The maximum is subtracted before the temperature divides, since huge logits over a tiny temperature would
    give inf - inf. Softmax does the rest in one fused pass, faster than exp. Its own sum, in fp32, scales the
    whole row: it cancels when `invert` divides by the sum of the weights in fp64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    return logits.softmax(-1)


def invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every row the index whose interval of the CDF contains u, the probability of that index, and
    how far u lies into its interval, from 0 at the left end to 1 at the right.

    With weights [1, 0, 2, 1] the running sums are [1, 1, 3, 4]. u = 0.5 asks for the point 0.5 * 4 = 2, and
    the first running sum above 2 is that of index 2. Its probability is 2/4, its interval is from 1 to 3, and
    2 lies (2 - 1) / 2 = 0.5 into it. An index of weight 0 has an empty interval, so it is never drawn.

    Shapes: weights (B, n), u (B,) in [0, 1) -> (B,), (B,), (B,).
    """
    wide = torch.float32 if weights.device.type == "mps" else torch.float64            # mps has no fp64
    edges = pad(weights.to(wide), (1, 0)).cumsum(-1)                                   # (B, n + 1)
    total = edges[:, -1:]
    target = u[:, None].clamp(max=LAST) * total                                        # below the total
    index = torch.searchsorted(edges, target, right=True) - 1
    index = index.clamp(max=weights.shape[1] - 1)                    # in a row of nan it would be too large
    weight = weights.gather(-1, index)
    inside = (target - edges.gather(-1, index)) / weight
    return index[:, 0], (weight / total)[:, 0], inside[:, 0]


def sample_torch(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Do what `sample` does, on any device, for a temperature above 0."""
    V, parts = logits.shape[-1], []
    few = max(1, CHUNK // max(V, BLOCK))
    for rows, numbers in zip(logits.split(few), u.split(few)):
        weights = weigh(rows, temperature)
        weights = pad(weights, (0, -V % BLOCK)) if V % BLOCK else weights
        weights = weights.view(len(rows), -1, BLOCK)                                   # (rows, blocks, BLOCK)
        block, p_block, inside = invert(weights.sum(-1), numbers)
        drawn = weights[torch.arange(len(rows), device=logits.device), block]          # (rows, BLOCK)
        parts.append((block, p_block, inside, drawn))
    block, p_block, inside, drawn = (torch.cat(part) for part in zip(*parts))
    token, p_token, _ = invert(drawn, inside)
    token = (block * BLOCK + token).clamp(max=V - 1)                 # in a row of nan it would be too large
    return token, (p_block.log() + p_token.log()).to(drawn.dtype)


@jit
def sum_blocks(logits, tops, sums, stride, V, temperature, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Write the maximum of each of TILE blocks of a row, and the sum of exp((logit - maximum) / temperature).

    Shapes: logits (B, V), tops (B, blocks), sums (B, blocks).
    """
    row, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(V, BLOCK)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * stride + at, mask=at < V, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 1)
    origin = tl.where(top == -float("inf"), 0.0, top)                      # an empty block sums to 0, not nan
    total = tl.sum(tl.exp((x - origin[:, None]) / temperature), 1)
    tl.store(tops + row * blocks + block, top, mask=block < blocks)
    tl.store(sums + row * blocks + block, total, mask=block < blocks)


@jit
def invert_row(weights, u, N: tl.constexpr):
    """Do what `invert` does to one row of N weights, N a power of 2.

    A parallel running sum may rise by a rounding error where a weight is 0, so indices of weight 0 are
    excluded explicitly.
    """
    at, weights = tl.arange(0, N), weights.to(tl.float64)
    edges, total = tl.cumsum(weights, 0), tl.sum(weights, 0)
    target = tl.minimum(u, 1 - 2 ** -24) * total                                        # LAST
    index = tl.min(tl.where((edges > target) & (weights > 0), at, N), 0)                # N if the row is nan
    weight = tl.sum(tl.where(at == index, weights, 0.0), 0)
    before = tl.sum(tl.where(at < index, weights, 0.0), 0)
    return index, weight / total, (target - before) / weight


@jit
def draw(logits, u, tops, sums, tokens, logprobs, stride, V, temperature, BLOCK: tl.constexpr,
         N: tl.constexpr):
    """Write the token of a row and its log-probability, from its block sums and the drawn block's logits.

    Shapes: logits (B, V), u (B,), tops (B, blocks), sums (B, blocks), tokens (B,), logprobs (B,). N is the
    least power of 2 that is not below the number of blocks.
    """
    row, blocks, at = tl.program_id(0).to(tl.int64), tl.cdiv(V, BLOCK), tl.arange(0, N)
    top = tl.load(tops + row * blocks + at, mask=at < blocks, other=-float("inf"))
    weights = tl.load(sums + row * blocks + at, mask=at < blocks, other=0.0)
    scale = tl.exp((top - tl.max(top, 0)) / temperature)
    weights = tl.where(weights == 0, 0.0, weights * scale)                              # nan stays nan
    block, p_block, inside = invert_row(weights, tl.load(u + row).to(tl.float64), N)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < V, other=-float("inf")).to(tl.float32)
    token, p_token, _ = invert_row(tl.exp((x - tl.max(x, 0)) / temperature), inside, BLOCK)
    tl.store(tokens + row, tl.minimum(block * BLOCK + token, V - 1))
    tl.store(logprobs + row, (tl.log(p_block) + tl.log(p_token)).to(tl.float32))


def sample_triton(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Do what `sample` does, on a GPU, for logits of at most 32 bits and a temperature above 0."""
    B, V = logits.shape
    blocks, u, temperature = triton.cdiv(V, BLOCK), u.contiguous(), float(temperature)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tops, sums = torch.empty(2, B, blocks, device=logits.device)
    tokens, logprobs = torch.empty_like(u, dtype=torch.long), torch.empty_like(u, dtype=torch.float32)
    sum_blocks[B, triton.cdiv(blocks, TILE)](logits, tops, sums, logits.stride(0), V, temperature, BLOCK,
                                             TILE)
    draw[B,](logits, u, tops, sums, tokens, logprobs, logits.stride(0), V, temperature, BLOCK,
             triton.next_power_of_2(blocks))
    return tokens, logprobs


def sample(logits: Tensor, u: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return for every row the token whose interval of the CDF contains u, and its log-probability.

    A token of probability zero is never returned. Temperature 0 is greedy, with log-probability 0. A row that
    holds nan gives some token, with log-probability nan.

    Shapes: logits (B, V), u (B,) in (0, 1) -> tokens (B,), logprobs (B,) in fp32 at least.
    """
    assert logits.shape[:1] == u.shape, f"one u per row: logits {tuple(logits.shape)}, u {tuple(u.shape)}"
    if temperature == 0:
        top, tokens = logits.max(-1)
        return tokens, (top - top).to(torch.promote_types(top.dtype, torch.float32))
    fused = triton and logits.is_cuda and logits.dtype != torch.float64
    return (sample_triton if fused else sample_torch)(logits, u, temperature)


def main() -> None:
    """Draw from a known distribution."""
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.15, 0.1])
    draws = 100_000
    u = uniform(torch.full((draws,), draw_key("demo")), torch.arange(draws))
    tokens, logprobs = sample(probabilities.log().expand(draws, -1), u)
    for token, p in enumerate(probabilities.tolist()):
        print(f"token {token}: probability {p:.3f}, frequency {(tokens == token).float().mean():.3f}")
    entropy = -(probabilities * probabilities.log()).nansum()
    print(f"mean log-probability {logprobs.mean():.3f}, minus the entropy {-entropy:.3f}")


if __name__ == "__main__":
    main()
