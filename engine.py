"""The engine: a model in the middle of many dialogues, fast because nothing is computed twice.

Caches live across turns: a turn feeds only what is new in it. The ragged texts of users are read in one
call, common beginnings once; finished dialogues leave the batch.

Run `python engine.py` to see what a turn costs with and without the cache.

Shapes: B rows, V vocabulary, T tokens.
"""

import os

import torch
from torch import Tensor

from chat import Chat, tiny_chat
from model import KVCache, Transformer, tiny_config
from sampling import draw_key, sample, uniform

SHARED = 16                      # tokens from which on it pays to read a common beginning once


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
    """Let an untrained model say five things, and count what it read."""
    chat = tiny_chat()
    model, read = Transformer(tiny_config(chat.vocab_size)), []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    engine = Engine(model, chat, [chat.open("how many apples?")], [draw_key("demo")], max_new_tokens=12)
    for turn in range(1, 6):
        read.clear()
        reply = engine.reply()[0]
        print(f"turn {turn}: {len(engine.tokens[0]):3d} tokens, of which {sum(read):2d} were read now: {reply}")
        engine.feed(0, chat.extend(reply[-1], "5 more apples"))


if __name__ == "__main__":
    main()
