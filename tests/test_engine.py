"""The engine says what reading every dialogue afresh would say."""

import torch

from engine import Engine
from logprobs import token_logprobs


def test_log_probabilities_recorded_while_sampling_equal_those_recomputed(chat, model):
    engine = Engine(model, chat, [chat.open(text) for text in ("hi", "how many apples?", "x y z")], [1, 2, 3],
                    max_new_tokens=9)
    for turn in range(3):
        engine.reply()
        for row in range(3):
            engine.feed(row, chat.extend(engine.tokens[row][-1], "5 more" * (1 + row * turn)))
    for tokens, mask, logprobs in zip(engine.tokens, engine.action_mask, engine.logprobs):
        again = token_logprobs(model, torch.tensor([tokens]), torch.tensor([mask]))[0]
        assert torch.allclose(again, torch.tensor(logprobs, dtype=torch.float64), atol=1e-9)
        assert sum(mask) > 0


def test_a_reply_never_exceeds_its_budget_or_the_context(chat, model):
    room = model.config.max_position_embeddings
    long = chat.open("apples " * (room - 8))
    engine = Engine(model, chat, [long, chat.open("hi")], [1, 2], max_new_tokens=30)
    replies = engine.reply()
    assert len(long) <= room and len(replies[0]) <= room and len(replies[1]) <= 30
    assert len(engine.tokens[0]) <= room
