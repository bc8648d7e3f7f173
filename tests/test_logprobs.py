"""Chunked log-probabilities are those of all logits at once, and packed dialogues do not see each other."""

import random

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Gemma3TextConfig

import logprobs as logprobs_module
from logprobs import ChosenLogprobs, micro_batches, pack, token_logprobs
from model import Transformer, autocast, tiny_config

V, D = 97, 12


def problem(positions=23, dtype=torch.float64, seed=0):
    """Return hidden states, a head, chosen tokens and what the loss says of each, all random."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
                    for shape in ((positions, D), (V, D)))
    return (hidden, head, torch.randint(V, (positions,), generator=generator),
            torch.randn(positions, generator=generator, dtype=torch.float64).to(dtype))


def whole(hidden, head, chosen, cap, temperature):
    """All logits at once: the definition."""
    scores = hidden @ head.T
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return (scores / temperature).log_softmax(-1).gather(-1, chosen[:, None])[:, 0]


@pytest.mark.parametrize("cap", (None, 1.5))
@pytest.mark.parametrize("temperature", (1.0, 0.6))
@pytest.mark.parametrize("chunk", (1, 5, 23, 1000))
def test_chunks_give_the_values_and_gradients_of_all_logits_at_once(chunk, temperature, cap, monkeypatch):
    """23 positions in chunks of 1, of 5 with 3 left over, and together."""
    monkeypatch.setattr(logprobs_module, "LOGITS", chunk * V)
    hidden, head, chosen, weights = problem()
    found = ChosenLogprobs.apply(hidden, head, chosen, cap, temperature, torch.float64)
    expected = whole(hidden, head, chosen, cap, temperature)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad((values * weights).sum(), (hidden, head))
                              for values in (found, expected))):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_the_gradient_agrees_with_finite_differences():
    hidden, head, chosen, _ = problem(positions=3)
    head, chosen = head.detach()[:7].requires_grad_(), chosen % 7
    assert torch.autograd.gradcheck(
        lambda h, w: ChosenLogprobs.apply(h, w, chosen, 2.0, 0.7, torch.float64), (hidden, head))


def test_in_fp32_gradients_agree_to_a_hundred_thousandth(monkeypatch):
    monkeypatch.setattr(logprobs_module, "LOGITS", 5 * V)
    hidden, head, chosen, weights = problem(dtype=torch.float32)
    found, expected = (torch.autograd.grad((values * weights).sum(), (hidden, head)) for values in (
        ChosenLogprobs.apply(hidden, head, chosen, None, 1.0, torch.float32),
        whole(hidden, head, chosen, None, 1.0)))
    for ours, theirs in zip(found, expected):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_in_bf16_what_chunks_add_up_to_does_not_depend_on_them(monkeypatch):
    """Products are rounded to bf16, sums over chunks are in fp32: many chunks are as good as one."""
    hidden, head, chosen, weights = problem(positions=200, dtype=torch.float32)
    exact = torch.autograd.grad((whole(hidden, head, chosen, None, 1.0) * weights).sum(), head)[0]
    errors = []
    for chunk in (200, 2):
        monkeypatch.setattr(logprobs_module, "LOGITS", chunk * V)
        values = ChosenLogprobs.apply(hidden, head, chosen, None, 1.0, torch.bfloat16)
        found = torch.autograd.grad((values * weights).sum(), head)[0]
        assert found.dtype == torch.float32
        errors.append(float((found - exact).norm() / exact.norm()))
    assert max(errors) < 0.02 and errors[1] < 2 * errors[0]


def test_more_than_a_chunk_of_logits_is_never_kept(monkeypatch):
    monkeypatch.setattr(logprobs_module, "LOGITS", 5 * V)
    hidden, head, chosen, _ = problem()
    sizes = []
    with saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        ChosenLogprobs.apply(hidden, head, chosen, None, 1.0, torch.float64)
    assert sizes and max(sizes) <= max(hidden.numel(), head.numel())


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do():
    hidden, head, chosen, _ = problem()
    head.requires_grad_(False)
    ChosenLogprobs.apply(hidden, head, chosen, None, 1.0, torch.float64).sum().backward()
    assert head.grad is None and hidden.grad.abs().sum() > 0


def test_nothing_asked_for_is_no_error():
    model = Transformer(tiny_config(vocab_size=50)).double()
    values = token_logprobs(model, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5).bool())
    values.sum().backward()
    assert values.tolist() == [[0.0] * 5] * 2


def gemma():
    """Every other layer sees three tokens."""
    return Transformer(Gemma3TextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"])).double()


def llama():
    return Transformer(tiny_config(vocab_size=50)).double()


@pytest.mark.parametrize("make, close", ((llama, 1e-11), (gemma, 1e-5)))        # Gemma's norms are in fp32
def test_packed_dialogues_have_the_values_and_gradients_that_each_has_alone(make, close):
    """Rows [7 + 4 + 1 padding] and [5 + 7]: positions start again, and no token sees another dialogue."""
    model, generator = make(), torch.Generator().manual_seed(0)
    dialogues = [torch.randint(50, (n,), generator=generator) for n in (7, 4, 5, 7)]
    masks = [torch.arange(len(ids)) % 2 == 1 for ids in dialogues]
    alone = [token_logprobs(model, ids[None], mask[None])[0] for ids, mask in zip(dialogues, masks)]
    nothing = torch.zeros(1, dtype=torch.long)

    def rows(values):
        return torch.stack([torch.cat([values[0], values[1], nothing]), torch.cat(values[2:])])
    tokens, mask, expected = rows(dialogues), rows(masks), rows(alone)
    segments = torch.tensor([[0] * 7 + [1] * 4 + [-1], [2] * 5 + [3] * 7])
    together = token_logprobs(model, tokens, mask, segments)
    assert torch.allclose(together, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(values.square().sum(), list(model.parameters()))
                 for values in (together, expected)]
    assert all(torch.allclose(ours, theirs, rtol=0, atol=close) for ours, theirs in zip(*gradients))


def test_rows_of_one_dialogue_each_need_no_mask(monkeypatch):
    """A dialogue of 7,000 tokens would have one of 49 million entries; no token sees padding after it."""
    model, masks = llama(), []
    make = model.attention_mask
    monkeypatch.setattr(model, "attention_mask", lambda *args: masks.append(make(*args)) or masks[-1])
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]).bool()
    values = token_logprobs(model, tokens, mask, torch.tensor([[4] * 6, [0, 0, 0, -1, -1, -1]]))
    assert masks == [None] and torch.equal(values, token_logprobs(model, tokens, mask))


@pytest.mark.parametrize("segments", (None, torch.tensor([[0, 0, 0, 1, 1]])))
def test_a_first_token_cannot_be_scored(segments):
    """Nothing is before it: neither at the start of a row, nor where the next dialogue of a row begins."""
    model, mask = Transformer(tiny_config(vocab_size=50)), torch.zeros(1, 5).bool()
    mask[0, 0 if segments is None else 3] = True
    with pytest.raises(AssertionError, match="first token"):
        token_logprobs(model, torch.zeros(1, 5, dtype=torch.long), mask, segments)


def test_under_autocast_log_probabilities_come_in_fp32_and_near_the_exact_ones():
    model = Transformer(tiny_config(vocab_size=50))
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9).bool()
    mask[:, 0] = False
    exact = token_logprobs(model, tokens, mask)
    with autocast(model.device, "bf16"):
        rounded = token_logprobs(model, tokens, mask)
    assert rounded.dtype == torch.float32 and torch.allclose(rounded, exact, atol=0.1)
    assert not torch.equal(rounded, exact)


# Rows of a forward pass -------------------------------------------------------------------------------------

def test_micro_batches_hold_every_dialogue_once_and_keep_to_the_budget():
    """Lengths 3, 9, 4, 9, a budget of 18: two of nine, then two padded to four. A budget of 1: one each."""
    lengths = torch.tensor([3, 9, 4, 9])
    assert [sorted(part.tolist()) for part in micro_batches(lengths, 18)] == [[1, 3], [0, 2]]
    assert [len(part) for part in micro_batches(lengths, 1)] == [1] * 4
    lengths = torch.randint(1, 60, (50,), generator=torch.Generator().manual_seed(0))
    for budget in (1, 59, 200, 10_000):
        parts = micro_batches(lengths, budget)
        assert torch.cat(parts).sort().values.tolist() == list(range(50))
        for part in parts:
            assert len(part) == 1 or len(part) * lengths[part].max() <= budget


def test_packing_puts_every_example_into_one_row_and_keeps_to_the_budget():
    """The example of `pack`, and 200 random ones: no row longer than the longest of its micro-batch."""
    assert pack([2, 5, 3, 4, 1], 10) == [[[1], [3, 4]], [[2], [0]]]
    rng = random.Random(0)
    for _ in range(200):
        lengths, budget = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))], rng.randint(1, 300)
        batches = pack(lengths, budget)
        assert sorted(i for rows in batches for row in rows for i in row) == list(range(len(lengths)))
        for rows in batches:
            longest = max(lengths[i] for row in rows for i in row)
            assert all(sum(lengths[i] for i in row) <= longest for row in rows)
            assert len(rows) * longest <= max(budget, longest)
