"""The sampler draws what the distribution says, whoever shares the batch."""

import pytest
import torch

from sampling import BLOCK, draw_key, sample, uniform


def chi_square(observed, expected):
    return ((observed - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("vocabulary", (2, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 7))
def test_frequencies_match_probabilities(vocabulary):
    """Chi-square over at most 20 bins stays below its 1 - 1e-6 quantile, which is 66 for 19 degrees of
    freedom.
    """
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    draws = 100_000
    u = uniform(torch.full((draws,), draw_key("chi", vocabulary)), torch.arange(draws))
    tokens = torch.cat([sample(logits.expand(len(part), -1), part)[0] for part in u.split(10_000)])
    bins = torch.arange(vocabulary) * min(20, vocabulary) // vocabulary
    observed = torch.zeros(20).index_add(0, bins[tokens], torch.ones(draws))
    expected = torch.zeros(20).index_add(0, bins, logits.softmax(-1) * draws)
    assert chi_square(observed[expected > 0], expected[expected > 0]) < 66


def test_the_log_probability_is_that_of_the_drawn_token():
    logits = 3 * torch.randn(200, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.rand(200, generator=torch.Generator().manual_seed(1)),
                              temperature=0.8)
    expected = (logits / 0.8).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-12)


@pytest.mark.parametrize("vocabulary", (2, 100, 1000, 50_000))
def test_a_token_of_probability_zero_is_never_drawn(vocabulary):
    """Every other logit is -inf, and the uniforms lie at the very ends of the unit interval too."""
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, 1::2] = float("-inf")
    logits[0, :-2] = float("-inf")
    tiny = 2.0 ** -25
    u = torch.cat([torch.tensor([tiny, 1 - 2.0 ** -24]).repeat(16), torch.linspace(tiny, 1 - 2.0 ** -24, 32)])
    tokens, logprobs = sample(logits, u)
    assert (tokens % 2 == 0).all() and (tokens < vocabulary).all() and logprobs.isfinite().all()


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e30, -1e30, 0.0], [3e38, 3e38, -3e38]])
    tokens, logprobs = sample(logits, torch.tensor([0.999, 0.75]))
    assert tokens.tolist() == [0, 1]
    assert logprobs.tolist() == pytest.approx([0.0, -0.6931472])


def test_temperature_zero_is_greedy():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs = sample(logits, torch.tensor([0.99]), temperature=0)
    assert tokens.tolist() == [1] and logprobs.tolist() == [0.0]


def test_a_rows_draw_does_not_depend_on_its_batch():
    logits = torch.randn(32, 400, generator=torch.Generator().manual_seed(0))
    keys, positions = torch.tensor([draw_key(i) for i in range(32)]), torch.arange(32)
    together = sample(logits, uniform(keys, positions))[0]
    for row in range(32):
        alone = sample(logits[row:row + 1], uniform(keys[row:row + 1], positions[row:row + 1]))[0]
        assert alone.item() == together[row].item()


def test_uniforms_are_uniform_along_keys_and_along_positions():
    """1,000 bins, 100,000 draws: chi-square has mean 999 and standard deviation 45; 300 from the mean is
    6.7 of them.
    """
    along_positions = uniform(torch.full((100_000,), draw_key("u")), torch.arange(100_000))
    along_keys = uniform(torch.tensor([draw_key("k", i) for i in range(100_000)]), torch.tensor(3))
    for u in (along_positions, along_keys):
        assert u.min() > 0 and u.max() < 1
        assert abs(chi_square(torch.histc(u, 1000, 0, 1), torch.full((1000,), 100.0)) - 999) < 300


def test_different_parts_of_a_key_give_different_streams():
    keys = {draw_key(seed, phase, step, problem, sample, speaker)
            for seed in range(2) for phase in ("train", "test") for step in range(3) for problem in range(3)
            for sample in range(3) for speaker in ("policy", "user")}
    assert len(keys) == 2 * 2 * 3 * 3 * 3 * 2
    assert draw_key(1, 23) != draw_key(12, 3)
