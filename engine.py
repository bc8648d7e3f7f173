"""The engine: a model in the middle of many dialogues, fast because nothing is computed twice.

1. *Caches live across turns.* A turn feeds only what is new in it; the ragged texts of users are read in one
   call, what all dialogues begin with is read once.
2. *Finished rows stop costing.* Dialogues that ended leave the batch, and when half of the replies of a turn
   are complete the others go on in a cache of their own.
3. *The token loop does not wait.* No Python runs over rows, and a GPU is asked only every 8 tokens whether
   all replies are complete; what was sampled after the end is thrown away.
4. *Weights in the order of the machine.* On a CPU, oneDNN multiplies faster with weights that were reordered
   once; an engine makes itself such a copy.

Run `python engine.py` to see how little a turn reads.

Shapes: B rows, V vocabulary, T tokens, D width.
"""

import copy
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cache import KVCache
from chat import Chat, tiny_chat
from model import Attention, FeedForward, Transformer, tiny_config
from sampling import draw_key, sample, uniform

SHARED = 16                      # tokens from which on it pays to read a common beginning once
ASK_EVERY = 8                    # tokens after which a GPU is asked whether replies are complete
WORTH_RECORDING = 16             # tokens to go from which on a CUDA graph pays
WIDE = 256                       # width of a model from which on reordered weights pay
TOGETHER = {Attention: ("q_proj", "k_proj", "v_proj"), FeedForward: ("gate_proj", "up_proj")}


def can_reorder(dtype: torch.dtype) -> bool:
    """Return whether this machine's oneDNN takes reordered weights of a type."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class ReorderedLinear(nn.Module):
    """Linear layers of one input, for inference on a CPU: one copy of their weights, in the order in which
    oneDNN reads them.

    Source: the operators that torch.compile's CPU backend uses when it freezes weights.
    """

    def __init__(self, layers: list[nn.Linear], dtype: torch.dtype):
        super().__init__()
        self.dtype, self.widths = dtype, [layer.out_features for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).to(dtype) if biases else None
        weight = torch.cat([layer.weight.detach() for layer in layers]).to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return out if len(self.widths) == 1 else out.split(self.widths, dim=-1)


def reordered(model: Transformer) -> Transformer:
    """Return a model that computes the same for inference, and shares what is not reordered; the model itself
    where that is not to be had or does not pay.
    """
    dtype = model.compute_dtype
    if model.device.type != "cpu" or model.config.hidden_size < WIDE or not can_reorder(dtype):
        return model
    model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in list(model.modules()):
        linear = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        together = TOGETHER.get(type(module), ())
        if together and linear.keys() >= set(together):                        # no adapters around them
            module.project = ReorderedLinear([linear.pop(name) for name in together], dtype).forward
        for name, layer in linear.items():
            setattr(module, name, ReorderedLinear([layer], dtype))
    return model


def recorded(function: Callable[[], None]) -> Callable[[], None]:
    """Return a CUDA graph of a function that has run before: one launch instead of hundreds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Replies:
    """Replies being sampled in b rows of a cache, a token of each at a time.

    Tensors change in place, so that a GPU can replay `next_token`: rows, keys, positions of the next token,
    ends that it may not reach, token, logprob, done (b,).
    """

    def __init__(self, model: Transformer, cache: KVCache, hidden: Tensor, keys: Tensor, positions: Tensor,
                 ends: Tensor, stops: Tensor):
        self.model, self.cache, self.keys, self.stops = model, cache, keys, stops
        self.positions, self.ends = positions.clone(), ends
        self.rows = torch.arange(len(keys), device=keys.device)
        self.token = torch.zeros_like(positions)
        self.logprob = torch.zeros_like(positions, dtype=torch.promote_types(hidden.dtype, torch.float32))
        self.done = torch.zeros_like(positions, dtype=torch.bool)
        self.sample(hidden)

    def sample(self, hidden: Tensor) -> None:
        """Sample the token that follows hidden states (b, D)."""
        token, logprob = sample(self.model.scores(hidden), uniform(self.keys, self.positions))
        self.token.copy_(token)
        self.logprob.copy_(logprob)
        self.positions += 1
        self.done |= (token[:, None] == self.stops).any(1) | (self.positions >= self.ends)

    def next_token(self) -> None:
        """Read the last tokens of replies that are not complete, and sample the next."""
        self.sample(self.model(self.token[:, None], self.cache, (~self.done).long())[:, 0])

    def narrow(self, left: Tensor, whole: KVCache) -> None:
        """Go on with the rows `left` alone, in a part of the cache."""
        self.settle(whole)
        for name in ("rows", "keys", "positions", "ends", "token", "logprob", "done"):
            setattr(self, name, getattr(self, name)[left])
        self.cache = whole.part(self.rows)

    def settle(self, whole: KVCache) -> None:
        """Let the whole cache know what was read."""
        if self.cache is not whole:
            whole.put_back(self.rows, self.cache)


class Engine:
    """A model in the middle of B dialogues: their ids, and a cache over what it has read of them.

    The buffers only grow. The cache lags behind: whatever it has not read (a user's text, the last sampled
    token) is fed in one ragged call before the next reply. So every turn costs only what is new in it.
    """

    def __init__(self, model: Transformer, chat: Chat, openings: list[list[int]], keys: list[int],
                 max_new_tokens: int):
        self.model, self.chat, self.max_new_tokens = reordered(model), chat, max_new_tokens
        self.room = model.config.max_position_embeddings                          # tokens a dialogue may hold
        self.ask_every = 1 if model.device.type == "cpu" else ASK_EVERY
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

        Shapes: B live dialogues: starts, ends (B,), tokens, logprobs (B, T).
        """
        lengths, device = [len(self.tokens[row]) for row in self.live], self.keys.device
        budgets = [min(self.max_new_tokens, self.room - length) for length in lengths]
        stops, starts, limits = (torch.tensor(values, dtype=torch.long, device=device)
                                 for values in (sorted(self.chat.stop_ids), lengths, budgets))
        assert min(budgets) > 0, f"dialogues without room for a token: lengths {lengths} of {self.room}"
        replies = Replies(self.model, self.cache, self.read(), self.keys, starts, starts + limits, stops)
        tokens = torch.zeros(len(lengths), max(budgets), dtype=torch.long, device=device)
        logprobs = torch.zeros_like(tokens, dtype=replies.logprob.dtype)
        next_token = replies.next_token
        for n in range(max(budgets)):
            tokens[replies.rows, n], logprobs[replies.rows, n] = replies.token, replies.logprob
            if n % self.ask_every == self.ask_every - 1:
                left = (~replies.done).nonzero()[:, 0]
                if len(left) == 0:
                    break
                if 2 * len(left) <= len(replies.rows):
                    replies.narrow(left, self.cache)
                    next_token = replies.next_token
            if n + 1 < max(budgets):
                next_token()
            if (self.model.cuda_graphs and next_token == replies.next_token
                    and max(budgets) - n > WORTH_RECORDING):
                replies.cache.fix(max(length + budget for length, budget in zip(lengths, budgets)))
                next_token = recorded(replies.next_token)
        replies.settle(self.cache)
        self.cache.fixed = False
        return self.append(tokens, logprobs, torch.isin(tokens, stops), limits)

    def append(self, tokens: Tensor, logprobs: Tensor, stopped: Tensor, limits: Tensor) -> list[list[int]]:
        """Append what was sampled (B, T) up to the first stop token or the limit (B,), and return it."""
        first = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, tokens.shape[1])
        counts = torch.minimum(first, limits).tolist()
        replies = [ids[:count] for ids, count in zip(tokens.tolist(), counts)]
        for row, ids, values in zip(self.live, replies, logprobs.tolist()):
            self.tokens[row] += ids
            self.action_mask[row] += [1] * len(ids)
            self.logprobs[row] += values[:len(ids)]
        return replies


def main() -> None:
    """Count what an untrained model reads when it says five things."""
    chat = tiny_chat()
    model, read = Transformer(tiny_config(chat.vocab_size)), []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    engine = Engine(model, chat, [chat.open("how many apples?")], [draw_key("demo")], max_new_tokens=12)
    for turn in range(1, 6):
        read.clear()
        reply = engine.reply()[0]
        print(f"turn {turn}: {len(engine.tokens[0]):3d} tokens, of which {sum(read):2d} were read now")
        engine.feed(0, chat.extend(reply[-1], "5 more apples"))


if __name__ == "__main__":
    main()
