"""The engine: a model in the middle of many dialogues, fast because nothing is computed twice.

1. *Caches live across turns.* A turn reads only its new tokens. User texts of different lengths are read in
   one call, and the beginning that all dialogues share is read once.
2. *Finished rows cost nothing.* Dialogues that ended leave the batch. As soon as half of a turn's replies
   are complete, the others go on in a smaller cache of their own.
3. *The token loop does not wait.* No Python loop runs over rows, and a GPU is asked only every 8 tokens
   whether all replies are complete. What was sampled after the end of a reply is thrown away.

Run `python engine.py` to see how little a turn reads.

Shapes: B live dialogues, b of them still being sampled, T tokens, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cache import KVCache
from chat import Chat, tiny_chat
from model import Transformer, tiny_config
from sampling import draw_key, sample, uniform

SHARED = 16                      # a common beginning of at least so many tokens is read once
ASK_EVERY = 8                    # tokens between questions to a GPU whether replies are complete
WORTH_RECORDING = 16             # a CUDA graph is recorded if more tokens than that may follow


def common_beginning(rows: list[list[int]]) -> list[int]:
    """Return the ids with which every row begins."""
    length = 0
    for ids in zip(*rows):
        if len(set(ids)) > 1:
            break
        length += 1
    return rows[0][:length] if rows else []


def recorded(function: Callable[[], None]) -> Callable[[], None]:
    """Record a function, which has run before, as a CUDA graph; return what replays it in a single launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Replies:
    """Replies being sampled in b rows of a cache; every `next_token` adds one token to each.

    Tensors change in place, so that a CUDA graph can replay `next_token`. All are (b,): rows (of the batch),
    draw_keys, positions (of the next tokens), ends (a reply is complete when its next position is its end),
    token and logprob (the newest of each reply), done.
    """

    def __init__(self, model: Transformer, cache: KVCache, hidden: Tensor, draw_keys: Tensor,
                 positions: Tensor, ends: Tensor, stops: Tensor):
        self.model, self.cache, self.draw_keys, self.stops = model, cache, draw_keys, stops
        self.positions, self.ends = positions.clone(), ends
        self.rows = torch.arange(len(draw_keys), device=draw_keys.device)
        self.token = torch.zeros_like(positions)
        self.logprob = torch.zeros_like(positions, dtype=torch.promote_types(hidden.dtype, torch.float32))
        self.done = torch.zeros_like(positions, dtype=torch.bool)
        self.sample(hidden)

    def sample(self, hidden: Tensor) -> None:
        """Sample the tokens that follow hidden states (b, D)."""
        token, logprob = sample(self.model.scores(hidden), uniform(self.draw_keys, self.positions))
        self.token.copy_(token)
        self.logprob.copy_(logprob)
        self.positions += 1
        self.done |= (token[:, None] == self.stops).any(1) | (self.positions >= self.ends)

    def next_token(self) -> None:
        """Feed the newest token of every reply that is not complete, and sample the next ones."""
        self.sample(self.model(self.token[:, None], self.cache, (~self.done).long())[:, 0])

    def narrow(self, left: Tensor, whole: KVCache) -> None:
        """Go on with the replies `left` alone, in a part of the `whole` cache."""
        self.settle(whole)
        for name in ("rows", "draw_keys", "positions", "ends", "token", "logprob", "done"):
            setattr(self, name, getattr(self, name)[left])
        self.cache = whole.part(self.rows)

    def settle(self, whole: KVCache) -> None:
        """Copy what a part of the cache has gained back into the `whole` one."""
        if self.cache is not whole:
            whole.put_back(self.rows, self.cache)


class Engine:
    """A model in the middle of B dialogues: their ids, and a cache over what it has read of them.

    The buffers of ids only grow, and the cache lags behind them: what it has not read yet, a user's text and
    the last sampled token, is fed in one ragged call before the next reply.
    """

    def __init__(self, model: Transformer, chat: Chat, openings: list[list[int]], draw_keys: list[int],
                 max_new_tokens: int):
        self.model, self.chat, self.max_new_tokens = model, chat, max_new_tokens
        self.room = model.config.max_position_embeddings                          # tokens a dialogue may hold
        self.ask_every = 1 if model.device.type == "cpu" else ASK_EVERY
        self.cache = KVCache(model.config, len(openings), model.device, model.compute_dtype)
        self.draw_keys = torch.tensor(draw_keys, dtype=torch.long, device=model.device)
        self.tokens = [list(ids) for ids in openings]                               # one buffer per dialogue
        self.action_mask = [[0] * len(ids) for ids in openings]
        self.logprobs = [[0.0] * len(ids) for ids in openings]
        self.live = list(range(len(openings)))                                # dialogues that the cache holds
        self.share_opening()

    @torch.no_grad()
    def share_opening(self) -> None:
        """Read once what all dialogues begin with, usually an instruction, and copy it to every row."""
        start = common_beginning([ids[:-1] for ids in self.tokens])     # `read` needs one more token per row
        if len(start) >= SHARED and len(self.tokens) > 1:
            one = torch.tensor([start], device=self.draw_keys.device)
            cache = KVCache(self.model.config, 1, self.model.device, self.model.compute_dtype)
            self.model(one, cache, torch.tensor([len(start)], device=self.draw_keys.device))
            self.cache = cache
            cache.keep(torch.zeros(len(self.tokens), dtype=torch.long, device=self.draw_keys.device))

    def feed(self, row: int, ids: list[int]) -> None:
        """Append ids that the model did not sample."""
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
            index = torch.tensor([at[row] for row in rows], dtype=torch.long, device=self.draw_keys.device)
            self.cache.keep(index)
            self.draw_keys, self.live = self.draw_keys[index], rows

    def has_room(self, row: int) -> bool:
        """Whether the dialogue can hold at least one more token."""
        return len(self.tokens[row]) < self.room

    def read(self) -> Tensor:
        """Feed what the cache has not seen yet; return the hidden state (B, D) of each row's last token."""
        seen = self.cache.lengths.tolist()
        new = [self.tokens[row][start:] for row, start in zip(self.live, seen)]
        counts = torch.tensor([len(ids) for ids in new], device=self.draw_keys.device)
        longest = max(len(ids) for ids in new)
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in new], device=self.draw_keys.device)
        hidden = self.model(padded, self.cache, counts)
        return hidden[torch.arange(len(new), device=hidden.device), counts - 1]

    @torch.no_grad()                      # in inference_mode autocast would cast all weights at every token
    def reply(self) -> list[list[int]]:
        """Sample a reply in every live dialogue, append it to its buffer and return its ids.

        A reply ends with a stop token, which is an action like any other, or is cut at the limit.

        Shapes: starts, limits (B,); tokens, logprobs (B, T).
        """
        lengths, device = [len(self.tokens[row]) for row in self.live], self.draw_keys.device
        budgets = [min(self.max_new_tokens, self.room - length) for length in lengths]
        stops, starts, limits = (torch.tensor(values, dtype=torch.long, device=device)
                                 for values in (sorted(self.chat.stop_ids), lengths, budgets))
        assert min(budgets) > 0, f"dialogues without room for a token: lengths {lengths} of {self.room}"
        replies = Replies(self.model, self.cache, self.read(), self.draw_keys, starts, starts + limits, stops)
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
        """Append the sampled tokens (B, T) up to the first stop token or the limit (B,); return their ids."""
        first = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, tokens.shape[1])
        counts = torch.minimum(first, limits).tolist()
        replies = [ids[:count] for ids, count in zip(tokens.tolist(), counts)]
        for row, ids, values in zip(self.live, replies, logprobs.tolist()):
            self.tokens[row] += ids
            self.action_mask[row] += [1] * len(ids)
            self.logprobs[row] += values[:len(ids)]
        return replies


def main() -> None:
    """Count the tokens that an untrained model reads over five turns."""
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
