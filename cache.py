"""The key-value cache of a batch of dialogues that grow at different speeds.

A dialogue keeps its keys and values over all turns, so every turn computes only its new tokens. These come as
a rectangle (B, T), padded on the right, but only attention works on the rectangle. Linear layers and norms
see the R real tokens alone, laid out in one row (1, R). `KVCache.place` says where each of them
stands in the rectangle and which slot of the cache its key and value go to.

An example: row 0 holds 37 tokens and gets 9, row 1 holds 12 and gets 3. The rectangle is (2, 9), and R = 12:

    rows       0  0  0  0  0  0  0  0  0  1  1  1       the row of each real token in the rectangle
    offsets    0  1  2  3  4  5  6  7  8  0  1  2       its column there
    slots     37 38 39 40 41 42 43 44 45 12 13 14       the slot of its row that stores its key and value

The rows then hold 46 and 15 tokens, and attention reads slots 0 to 45 of both. A token sees no slot beyond
its own, so no token of row 1 ever sees its slots 15 to 45, which hold nothing. The 6 tokens of padding are
queries of zeros: what attention computes for them is dropped, and nothing of them is stored.

Run `python cache.py` to see this example.

Shapes: B rows, T tokens, R real tokens, S cached tokens, K key heads, E head size.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

GROWTH = 256                # slots that a cache grows by beyond what it needs, so that it seldom has to grow


def head_size(config: PreTrainedConfig) -> int:
    """Return E."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class KVCache:
    """Keys and values of B dialogues, each with its own length; the capacity grows when it has to.

    Every row has one spare slot after its capacity. When each row is fed one token, a row whose reply is
    complete writes there. If the cache grows, the spare slot becomes an ordinary one that holds nothing: the
    mask hides it until a token is stored in it.

    Shapes: keys and values of a layer (B, K, capacity + 1, E); lengths (B,); rows, offsets, slots (R,).
    """

    def __init__(self, config: PreTrainedConfig, batch: int, device=None, dtype=None):
        empty = torch.zeros(batch, config.num_key_value_heads, 1, head_size(config), device=device,
                            dtype=dtype)
        self.keys = [empty] * config.num_hidden_layers
        self.values = [empty] * config.num_hidden_layers
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 0                   # no row is longer: attention reads no further
        self.fixed = False                 # whether all shapes have to stay as they are
        self.rows = self.offsets = self.slots = None       # where the newest tokens are, see `place`

    @property
    def capacity(self) -> int:
        """The number of tokens that a row can hold before the cache has to grow."""
        return self.keys[0].shape[2] - 1

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens per row, and for some more."""
        if tokens > self.capacity:
            more = tokens - self.capacity + GROWTH
            for tensors in (self.keys, self.values):
                for layer, old in enumerate(tensors):
                    tensors[layer] = F.pad(old, (0, 0, 0, more))

    def fix(self, tokens: int) -> None:
        """Make room for so many tokens per row and keep all shapes from now on."""
        self.reserve(tokens)
        self.longest, self.fixed = tokens, True

    def keep(self, rows: Tensor) -> None:
        """Drop every dialogue but `rows`."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old[rows]                  # layer by layer: there are never two whole caches
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0

    def part(self, rows: Tensor) -> "KVCache":
        """Return a copy of `rows` as a smaller cache, in which they go on while the other rows wait."""
        part = copy.copy(self)
        part.lengths, part.fixed = self.lengths[rows], False
        part.longest = int(part.lengths.max())
        part.keys, part.values = ([F.pad(old[rows, :, :part.longest], (0, 0, 0, 1)) for old in tensors]
                                  for tensors in (self.keys, self.values))
        return part

    def put_back(self, rows: Tensor, part: "KVCache") -> None:
        """Copy a `part` that has gone on back into its rows."""
        self.longest = max(self.longest, part.longest)
        self.reserve(self.longest)
        for tensors, news in ((self.keys, part.keys), (self.values, part.values)):
            for old, new in zip(tensors, news):
                old[rows, :, :part.longest] = new[:, :, :part.longest]
        self.lengths[rows] = part.lengths

    def place(self, counts: Tensor, T: int) -> None:
        """Choose the slots of new tokens (B, T), of which the first `counts` (B,) of each row are real.

        Token i of the R real ones is tokens[rows[i], offsets[i]] and goes to slots[i] of its row. With T = 1
        all B tokens count as real, and one whose count is 0 goes to the spare slot: leaving it out would make
        R depend on the data, for which a GPU would have to wait at every token.
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
        """Store k and v (1, K, R, E) in their slots; return what attention reads, (B, K, S, E) each."""
        self.keys[layer][self.rows, :, self.slots] = k[0].transpose(0, 1)
        self.values[layer][self.rows, :, self.slots] = v[0].transpose(0, 1)
        return self.keys[layer][:, :, :self.longest], self.values[layer][:, :, :self.longest]

    def padded(self, x: Tensor, T: int) -> Tensor:
        """Return x (1, heads, R, E) in the rectangle, as (B, heads, T, E) with zeros for padding."""
        if T == 1:
            return x.transpose(0, 2)
        out = x.new_zeros(len(self.lengths), T, x.shape[1], x.shape[3])
        out[self.rows, self.offsets] = x[0].transpose(0, 1)
        return out.transpose(1, 2)


def main() -> None:
    """Print the example of this file's docstring."""
    cache = KVCache(LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1), batch=2)
    for counts in (torch.tensor([37, 12]), torch.tensor([9, 3])):
        held, T = cache.lengths.tolist(), int(counts.max())
        cache.place(counts, T)
        cache.lengths += counts
    print(f"the rows hold {held} tokens and get {counts.tolist()}: a rectangle (2, {T}), "
          f"{counts.sum()} of its tokens are real")
    for name in ("rows", "offsets", "slots"):
        print(f"{name:8s}" + "".join(f"{value:3d}" for value in getattr(cache, name).tolist()))
    print(f"now they hold {cache.lengths.tolist()} tokens, attention reads slots 0 to {cache.longest - 1}")


if __name__ == "__main__":
    main()
