"""The sampler, and the engine that lets a model speak in many dialogues at once.

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

import os
from hashlib import blake2b

import torch
from torch import Tensor

from chat import Chat
from model import KVCache, Transformer

BLOCK = 128                      # tokens a block of the inverse CDF
SHARED = 16                      # tokens from which on it pays to read a common beginning once


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


class Engine:
    """A model in the middle of B dialogues: their ids, and a cache over what it has read of them.

    The buffers only grow. The cache lags behind: whatever it has not read (a user's text, the last sampled
    token) is fed in one ragged call before the next reply. So every turn costs only what is new in it.
    """

    def __init__(self, model: Transformer, chat: Chat, openings: list[list[int]], keys: list[int],
                 max_new_tokens: int):
        self.model, self.chat, self.max_new_tokens = model, chat, max_new_tokens
        self.room = model.config.max_position_embeddings                          # tokens a dialogue may hold
        self.cache = KVCache(model.config, len(openings), model.device, model.compute_dtype)
        self.keys = torch.tensor(keys, dtype=torch.long, device=model.device)
        self.tokens = [list(ids) for ids in openings]                                    # a buffer a dialogue
        self.action_mask = [[0] * len(ids) for ids in openings]
        self.logprobs = [[0.0] * len(ids) for ids in openings]
        self.live = list(range(len(openings)))                                # dialogues that the cache holds
        self.share_opening()

    @torch.no_grad()
    def share_opening(self) -> None:
        """Read once what all dialogues begin with, an instruction perhaps, and give every row a copy."""
        start = os.path.commonprefix([ids[:-1] for ids in self.tokens])      # a reply needs a token to follow
        if len(start) >= SHARED and len(self.tokens) > 1:
            one = torch.tensor([start], device=self.keys.device)
            cache = KVCache(self.model.config, 1, self.model.device, self.model.compute_dtype)
            self.model(one, cache, torch.tensor([len(start)], device=self.keys.device))
            self.cache = cache
            cache.keep(torch.zeros(len(self.tokens), dtype=torch.long, device=self.keys.device))

    def feed(self, row: int, ids: list[int]) -> None:
        """Append what the model did not say."""
        self.tokens[row] += ids
        self.action_mask[row] += [0] * len(ids)
        self.logprobs[row] += [0.0] * len(ids)

    def take_back(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a dialogue."""
        for values in (self.tokens, self.action_mask, self.logprobs):
            del values[row][length:]
        self.cache.lengths[self.live.index(row)].clamp_(max=length)
        self.cache.longest = int(self.cache.lengths.max())

    def keep(self, rows: list[int]) -> None:
        """Let every dialogue but `rows` leave the batch."""
        if rows != self.live:
            at = {row: i for i, row in enumerate(self.live)}
            index = torch.tensor([at[row] for row in rows], dtype=torch.long, device=self.keys.device)
            self.cache.keep(index)
            self.keys, self.live = self.keys[index], rows

    def has_room(self, row: int) -> bool:
        """Whether the dialogue can hold at least one more token."""
        return len(self.tokens[row]) < self.room

    def read(self) -> Tensor:
        """Feed what the cache has not seen of the live dialogues; return the hidden state (B, D) of each
        one's last token.
        """
        seen = self.cache.lengths.tolist()
        new = [self.tokens[row][start:] for row, start in zip(self.live, seen)]
        counts = torch.tensor([len(ids) for ids in new], device=self.keys.device)
        longest = max(len(ids) for ids in new)
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in new], device=self.keys.device)
        hidden = self.model(padded, self.cache, counts)
        return hidden[torch.arange(len(new), device=hidden.device), counts - 1]

    @torch.no_grad()                        # inference_mode would keep autocast from remembering cast weights
    def reply(self) -> list[list[int]]:
        """Sample a reply in every live dialogue, append it to its buffer and return its ids.

        A reply ends with a stop token, which is an action like any other, or unfinished at the limit.

        Shapes: B is the number of live dialogues; lengths, limit, done, counts, u, token (B,); hidden (B, D).
        """
        stops = torch.tensor(sorted(self.chat.stop_ids), device=self.keys.device)
        lengths = torch.tensor([len(self.tokens[row]) for row in self.live], device=self.keys.device)
        limit = (self.room - lengths).clamp(max=self.max_new_tokens)         # tokens that this reply may have
        done = torch.zeros(len(self.live), dtype=torch.bool, device=self.keys.device)
        hidden, tokens, logprobs, counts = self.read(), [], [], torch.zeros_like(limit)
        while True:
            u = uniform(self.keys, lengths + counts)
            token, logprob = sample(self.model.logits(hidden), u)
            tokens.append(token)
            logprobs.append(logprob)
            counts += ~done
            done |= torch.isin(token, stops) | (counts >= limit)
            if done.all():
                break
            hidden = self.model(token[:, None], self.cache, (~done).long())[:, 0]
        tokens, logprobs = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
        replies = [ids[:count] for ids, count in zip(tokens, counts.tolist())]
        for row, ids, values in zip(self.live, replies, logprobs):
            self.tokens[row] += ids
            self.action_mask[row] += [1] * len(ids)
            self.logprobs[row] += values[:len(ids)]
        return replies


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
