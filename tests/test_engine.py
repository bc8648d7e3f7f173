"""The engine says what reading every dialogue afresh would say, whatever it does to be fast."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen2Config

import engine as engine_module
from cache import KVCache
from engine import Engine
from extras.lora import add_adapters
from grpo import advantages, update
from logprobs import token_logprobs
from model import Transformer, autocast, tiny_config
from rollout import pad, rollout
from sampling import sample, uniform
from simulator import ModelUser
from task_math import TASK
from tasks import generate_problems

TEXTS = ("hi", "how many apples?", "x y z", "I have 7 apples at first. I give 3 apples away.", "", "no")


def simple_loop(model, stops, tokens, draw_key, max_new_tokens):
    """One dialogue, one token after the other, everything read again for each: what the engine must equal."""
    tokens = list(tokens)
    for _ in range(min(max_new_tokens, model.config.max_position_embeddings - len(tokens))):
        logits = model.logits(model(torch.tensor([tokens]))[:, -1])
        token, _ = sample(logits, uniform(torch.tensor([draw_key]), torch.tensor([len(tokens)])))
        tokens.append(token.item())
        if tokens[-1] in stops:
            break
    return tokens


def stopping(chat, share):
    """Return a chat whose replies end often: so many of a thousand ids are stop tokens."""
    stops = {id for id in range(chat.vocab_size) if id * 7919 % 1000 < share}
    return SimpleNamespace(stop_ids=stops, open=chat.open, extend=chat.extend)


def talk(model, chat, turns=3, max_new_tokens=12, prepare=lambda engine: None):
    """Return an engine after some turns with users of different length; row 1 leaves after the first."""
    engine = Engine(model, chat, [chat.open(text) for text in TEXTS], list(range(len(TEXTS))), max_new_tokens)
    prepare(engine)
    for turn in range(turns):
        engine.reply()
        if turn == 0:
            engine.keep([row for row in engine.live if row != 1])
        for row in engine.live:
            engine.feed(row, chat.extend(engine.tokens[row][-1], "5 more" * (row * turn % 3)))
    return engine


@pytest.mark.parametrize("share", (0, 60, 200))
def test_the_engine_says_what_the_simple_loop_says(model, chat, share):
    """In float64, token for token, whether replies never stop, sometimes, or mostly at once."""
    chat = stopping(chat, share)
    engine = talk(model, chat)
    for row, text in enumerate(TEXTS):
        tokens = chat.open(text)
        for turn in range(1 if row == 1 else 3):
            tokens = simple_loop(model, chat.stop_ids, tokens, row, 12)
            if row != 1:
                tokens += chat.extend(tokens[-1], "5 more" * (row * turn % 3))
        assert engine.tokens[row] == tokens


@torch.no_grad()
def test_finished_rows_leave_no_trace(model, chat):
    """After turns in which replies ended at different tokens and went on in parts of the cache, every row
    holds the keys and values that reading it afresh gives.
    """
    engine = talk(model, stopping(chat, 100))
    for at, row in enumerate(engine.live):
        length = int(engine.cache.lengths[at])
        fresh = KVCache(model.config, 1, dtype=torch.float64)
        model(torch.tensor([engine.tokens[row][:length]]), fresh, torch.tensor([length]))
        for ours, theirs in zip(engine.cache.keys + engine.cache.values, fresh.keys + fresh.values):
            assert torch.allclose(ours[at, :, :length], theirs[0, :, :length], atol=1e-12)


def test_asking_late_whether_replies_are_complete_changes_nothing(model, chat):
    """As on a GPU, where the answer takes waiting: what is sampled after the end is thrown away."""
    chat = stopping(chat, 100)
    often = talk(model, chat)
    for every in (2, 5, 8, 100):
        late = talk(model, chat, prepare=lambda engine: setattr(engine, "ask_every", every))
        assert late.tokens == often.tokens and late.action_mask == often.action_mask
        assert all(a == pytest.approx(b, abs=1e-12) for a, b in zip(late.logprobs, often.logprobs))


@pytest.mark.parametrize("family", ("llama", "gemma3_text"))
def test_a_token_loop_whose_shapes_stay_fixed_says_the_same(model, chat, family, monkeypatch):
    """What a CUDA graph replays, here called instead: the same function on the same tensors every time."""
    if family == "gemma3_text":
        model = Transformer(Gemma3TextConfig(
            vocab_size=chat.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"])).double()
    chat = stopping(chat, 100)
    eager, steps = talk(model, chat), []

    def recorded(next_token):
        replies = next_token.__self__
        tensors = [value for value in vars(replies).values() if isinstance(value, torch.Tensor)]
        tensors += [*replies.cache.keys, *replies.cache.values, replies.cache.lengths]

        def replay():
            next_token()
            now = [value for value in vars(replies).values() if isinstance(value, torch.Tensor)]
            now += [*replies.cache.keys, *replies.cache.values, replies.cache.lengths]
            assert all(a is b for a, b in zip(now, tensors, strict=True))      # no graph would see another
            steps.append(1)
        return replay
    monkeypatch.setattr(engine_module, "recorded", recorded)
    monkeypatch.setattr(engine_module, "WORTH_RECORDING", 2)
    model.cuda_graphs = True
    fixed = talk(model, chat, prepare=lambda engine: setattr(engine, "ask_every", 3))
    assert fixed.tokens == eager.tokens and len(steps) > 10


def random_model(kind):
    """Biases are Qwen2's, adapters have small matrices; none of them is zero, as they are before training."""
    sizes = dict(vocab_size=300, hidden_size=256, intermediate_size=320, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = Transformer(Qwen2Config(**sizes) if kind == "biases" else tiny_config(**sizes, head_dim=64))
    if kind == "adapters":
        add_adapters(model, 4, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "expand")):
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


@pytest.mark.parametrize("precision, close", (("fp32", 1e-3), ("bf16", 0.5)))
@pytest.mark.parametrize("kind", ("llama", "biases", "adapters"))
@torch.no_grad()
def test_an_engine_records_the_log_probabilities_that_the_model_computes(kind, precision, close):
    model = random_model(kind)
    tokens = torch.randint(300, (3, 9), generator=torch.Generator().manual_seed(3))
    with autocast(model.device, precision):
        engine = Engine(model, SimpleNamespace(stop_ids={7}), tokens.tolist(), [1, 2, 3], max_new_tokens=20)
        engine.reply()
        for ids, mask, logprobs in zip(engine.tokens, engine.action_mask, engine.logprobs):
            again = token_logprobs(model, torch.tensor([ids]), torch.tensor([mask]))[0]
            assert torch.allclose(again, torch.tensor(logprobs), atol=close)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_says_what_the_eager_loop_says(chat):
    model = Transformer(tiny_config(vocab_size=chat.vocab_size)).double().cuda()
    eager = talk(model, stopping(chat, 30), max_new_tokens=40)
    model.cuda_graphs = True
    assert talk(model, stopping(chat, 30), max_new_tokens=40).tokens == eager.tokens


@pytest.mark.parametrize("openings", ([[5]], [[5], [6], [7]], [[1, 2, 3]]))
def test_a_batch_of_one_and_openings_of_one_token(model, openings):
    engine = Engine(model, SimpleNamespace(stop_ids={3}), openings, list(range(len(openings))), 10)
    engine.reply()
    for row, opening in enumerate(openings):
        assert engine.tokens[row] == simple_loop(model, {3}, opening, row, 10)


def test_memory_stays_flat_over_fifty_steps(chat):
    """Rollouts against a simulator and updates: between the fifth step and the last no tensor is added."""
    model = Transformer(tiny_config(chat.vocab_size, hidden_size=16, intermediate_size=16,
                                    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    user = ModelUser(copy.deepcopy(model), chat, 4)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    problems = generate_problems(TASK, "train", 2) * 2
    held = []
    for step in range(50):
        draw_keys = [(0, "train", step, problem.id, i) for i, problem in enumerate(problems)]
        trajectories = rollout(model, chat, user, TASK, problems, draw_keys, horizon=2, max_new_tokens=4)
        update(model, optimiser, *pad(trajectories),
               advantages(torch.tensor([[0.0, 1.0], [1.0, 0.0]])).flatten())
        del trajectories, user.engine
        if step in (4, 49):
            gc.collect()
            held.append(sum(o.nbytes for o in gc.get_objects() if issubclass(type(o), torch.Tensor)))
    assert held[0] == held[1]


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
