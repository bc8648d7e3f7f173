"""The sampler.

`sample` turns logits into the next token and its log-probability in one pass. Two decisions matter:

1. *Randomness is a function, not a state.* The uniform number behind a token is a hash of (seed, phase, step,
   problem, sample, speaker, position). Equal logits give equal draws whoever shares the batch, nothing
   repeats between steps or speakers, and a run can be resumed anywhere.
2. *Inverse CDF over block sums.* One uniform a row picks a block of the vocabulary, then a token in it, so
   nothing of size V is drawn. There is no top-k or top-p: the recorded log-probability is that of the
   distribution that is trained, and the first importance ratio after a rollout is 1.

Run `python sampling.py` to compare frequencies with probabilities.

Shapes: B rows, V vocabulary, T tokens.
"""

from hashlib import blake2b

import torch
from torch import Tensor

BLOCK = 128                      # tokens a block of the inverse CDF


def draw_key(*parts) -> int:
    """Return a 63-bit key for a stream of draws: draw_key(seed, "train", step, problem, sample, "policy")."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return a number in (0, 1) for every key at a position: a counter-based hash with 24 random bits.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping int64 arithmetic.
    """
    x = keys + (positions + 1) * -7046029254386353131                              # 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687                       # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685                      # 0x94D049BB133111EB
    x = x ^ (x >> 31 & 0x1FFFFFFFF)
    u = ((x >> 40 & 0xFFFFFF).float() + 0.5) / 2 ** 24
    return u.clamp(max=1 - 2 ** -24)                                             # fp32 rounds the last one up


def below(x: Tensor) -> Tensor:
    """Return the next smaller number: a target below a running sum ends on a token that raised it."""
    return torch.nextafter(x, torch.zeros_like(x))


def sample(logits: Tensor, u: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the token of every row at quantile `u` of its distribution, and the token's log-probability.

    A token of probability zero is never returned. Temperature 0 is greedy, with log-probability 0.

    Shapes: logits (B, V), u (B,) in (0, 1) -> tokens (B,), logprobs (B,).
    """
    assert logits.shape[:1] == u.shape, f"one uniform a row: logits {tuple(logits.shape)}, u {tuple(u.shape)}"
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), dtype=logits.dtype, device=logits.device)
    B, V = logits.shape
    scaled = logits / temperature
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp()                                                 # (B, V), the largest is 1
    blocks = torch.nn.functional.pad(weights, (0, -V % BLOCK)).view(B, -1, BLOCK)
    totals = blocks.sum(-1).cumsum(-1)                                             # (B, V / BLOCK)
    total = totals[:, -1]
    target = torch.minimum(u * total, below(total))[:, None]
    block = (totals <= target).sum(-1, keepdim=True)                # the first whose total exceeds the target
    before = torch.where(block > 0, totals.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(B, device=logits.device), block[:, 0]].cumsum(-1)           # (B, BLOCK)
    target = torch.minimum(target - before, below(inside[:, -1:]))       # sums round differently: stay inside
    token = block[:, 0] * BLOCK + (inside <= target).sum(-1)
    return token, (scaled.gather(-1, token[:, None]) - top)[:, 0] - total.log()


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
