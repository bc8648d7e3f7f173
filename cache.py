"""The key-value cache of a batch of dialogues that grow at different speeds.

A dialogue keeps its keys and values over all turns: every turn computes only what is new. Replies that are
still being sampled when most are complete go on in a `part` of the cache.

Run `python cache.py` to see ragged tokens find their slots.

Shapes: B rows, T tokens, A new tokens, S cached tokens, K key heads, E head size.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

GROWTH = 256                                              # tokens that a cache grows by beyond what it must


def head_size(config: PreTrainedConfig) -> int:
    """Return E."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class KVCache:
    """Keys and values of B dialogues, each with its own length; the capacity grows when it has to.

    New tokens come as (B, T), right padded. Everything but attention sees only the A real ones, in one row.
    Rows without a new token write into one slot beyond the capacity; should it become a real slot, it is
    masked until it is overwritten.

    Shapes: keys and values of a layer (B, K, capacity + 1, E); lengths (B,); rows, offsets, slots (A,).
    """

    def __init__(self, config: PreTrainedConfig, batch: int, device=None, dtype=None):
        empty = torch.zeros(batch, config.num_key_value_heads, 1, head_size(config), device=device,
                            dtype=dtype)
        self.keys = [empty] * config.num_hidden_layers
        self.values = [empty] * config.num_hidden_layers
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 0                   # no row is longer: attention reads no further
        self.fixed = False                 # whether all shapes are to stay as they are
        self.rows = self.offsets = self.slots = None       # where the newest tokens are, see `place`

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold before the cache must grow."""
        return self.keys[0].shape[2] - 1

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens a row, and for some more."""
        if tokens > self.capacity:
            more = tokens - self.capacity + GROWTH
            for tensors in (self.keys, self.values):
                for layer, old in enumerate(tensors):
                    tensors[layer] = F.pad(old, (0, 0, 0, more))

    def fix(self, tokens: int) -> None:
        """Keep all shapes as they are from now on, with room for so many tokens a row."""
        self.reserve(tokens)
        self.longest, self.fixed = tokens, True

    def keep(self, rows: Tensor) -> None:
        """Drop every dialogue but `rows`."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old[rows]                     # a layer at a time: never two whole caches
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0

    def part(self, rows: Tensor) -> "KVCache":
        """Return a cache of `rows` alone, to go on with while the others rest."""
        part = copy.copy(self)
        part.lengths, part.fixed = self.lengths[rows], False
        part.longest = int(part.lengths.max())
        part.keys, part.values = ([F.pad(old[rows, :, :part.longest], (0, 0, 0, 1)) for old in tensors]
                                  for tensors in (self.keys, self.values))
        return part

    def put_back(self, rows: Tensor, part: "KVCache") -> None:
        """Take over what a `part` has become."""
        self.longest = max(self.longest, part.longest)
        self.reserve(self.longest)
        for tensors, news in ((self.keys, part.keys), (self.values, part.values)):
            for old, new in zip(tensors, news):
                old[rows, :, :part.longest] = new[:, :, :part.longest]
        self.lengths[rows] = part.lengths

    def place(self, counts: Tensor, T: int) -> None:
        """Choose the slots of new tokens, the first counts (B,) of T a row: token i is
        tokens[rows[i], offsets[i]] and goes to slots[i].

        With one token a row, all are kept: selecting would make shapes depend on data at every token.
        """
        if T == 1:
            self.rows = torch.arange(len(counts), device=counts.device)
            if not self.fixed:
                self.longest += 1
                self.reserve(self.longest)
            self.offsets = torch.zeros_like(self.rows)
            self.slots = self.lengths.masked_fill(counts == 0, self.capacity)
        else:
            self.rows, self.offsets = (torch.arange(T, device=counts.device)
                                       < counts[:, None]).nonzero(as_tuple=True)
            self.longest = int((self.lengths + counts).max())
            self.reserve(self.longest)
            self.slots = self.lengths[self.rows] + self.offsets

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (1, K, A, E) in their slots; return all keys and values up to the longest row."""
        self.keys[layer][self.rows, :, self.slots] = k[0].transpose(0, 1)
        self.values[layer][self.rows, :, self.slots] = v[0].transpose(0, 1)
        return self.keys[layer][:, :, :self.longest], self.values[layer][:, :, :self.longest]

    def padded(self, x: Tensor, T: int) -> Tensor:
        """Return x (1, heads, A, E) as (B, heads, T, E), zero where there is no new token."""
        if T == 1:
            return x.transpose(0, 2)
        out = x.new_zeros(len(self.lengths), T, x.shape[1], x.shape[3])
        out[self.rows, self.offsets] = x[0].transpose(0, 1)
        return out.transpose(1, 2)


def main() -> None:
    """Place five tokens in row 0 and two in row 1, then one in each."""
    cache = KVCache(LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1), batch=2)
    for counts in ([5, 2], [1, 1]):
        counts = torch.tensor(counts)
        cache.place(counts, T=int(counts.max()))
        cache.lengths += counts
        print(f"rows {cache.rows.tolist()}, slots {cache.slots.tolist()}; lengths are now "
              f"{cache.lengths.tolist()}, attention reads {cache.longest}")


if __name__ == "__main__":
    main()
