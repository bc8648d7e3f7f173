"""The reinforcement-learning maths, against hand calculation and enumeration."""

from itertools import product

import pytest
import torch

from grpo import advantages, policy_loss, update
from logprobs import token_logprobs
from model import Transformer, tiny_config


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 0.5, std 0.5 (ddof 0). Rewards 3, 1, 1, 1: mean 1.5, std sqrt(0.75)."""
    A = advantages(torch.tensor([[1.0, 0, 0, 1], [3.0, 1, 1, 1]]))
    assert torch.allclose(A, torch.tensor([[1, -1, -1, 1], [3 ** 0.5, -3 ** -0.5, -3 ** -0.5, -3 ** -0.5]]))


@pytest.mark.parametrize("value", (0.0, 1.0, 0.1, 1 / 3, 1e-8, 1e8))
def test_equal_rewards_give_exactly_zero(value):
    """The mean of equal floats is not always that float: a tiny std once blew such advantages up."""
    assert (advantages(torch.full((2, 7), value)) == 0).all()


def test_advantages_are_within_the_group_not_over_the_batch():
    easy_and_hard = advantages(torch.tensor([[1.0, 1, 1, 0], [1.0, 0, 0, 0]]), divide_by_std=False)
    assert torch.allclose(easy_and_hard,
                          torch.tensor([[0.25, 0.25, 0.25, -0.75], [0.75, -0.25, -0.25, -0.25]]))


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        advantages(torch.ones(3, 1))


def test_the_clipped_surrogate_by_hand():
    """Ratios 1.5 and 0.5 with eps 0.2 and A = +1, -1: min(1.5, 1.2) = 1.2, min(0.5, 0.8) = 0.5; min(-1.5,
    -1.2) = -1.5, min(-0.5, -0.8) = -0.8. Two tokens of four are clipped; the loss is -(1.2 + 0.5 - 1.5 -
    0.8) / 4 = 0.15.
    """
    logprobs = torch.tensor([[1.5, 0.5], [1.5, 0.5]]).log()
    loss, stats = policy_loss(logprobs, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.ones(2, 2).bool(),
                              normaliser=4)
    assert loss.item() == pytest.approx(0.15)
    assert stats["clipped"].item() == 2 and stats["ratio_max"].item() == pytest.approx(1.5)


def test_the_largest_ratio_is_that_of_an_action():
    """Two actions with the ratios 0.5 and 0.8, and a token of the user, whose ratio would be 1."""
    logprobs = torch.tensor([[0.5, 0.8, 1.0]]).log()
    _, stats = policy_loss(logprobs, torch.zeros(1, 3), torch.ones(1), torch.tensor([[True, True, False]]), 2)
    assert stats["ratio_max"].item() == pytest.approx(0.8)


def test_k3_by_hand_and_its_gradient_pulls_towards_the_reference():
    """d = log ref - log pi = log 2: k3 = 2 - log 2 - 1. With A = 0 only the penalty is left, and descent
    raises log pi.
    """
    logprobs = torch.zeros(1, 1, requires_grad=True)
    loss, stats = policy_loss(logprobs, torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1).bool(), 1,
                              ref_logprobs=torch.tensor([[2.0]]).log(), kl_coef=0.5)
    expected = 1 - torch.tensor(2.0).log().item()
    assert stats["kl"].item() == pytest.approx(expected) and loss.item() == pytest.approx(0.5 * expected)
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * (1 - 2))


def test_user_tokens_have_exactly_no_gradient():
    logprobs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]]).bool()
    loss, _ = policy_loss(logprobs, logprobs.detach() + 0.1, torch.tensor([1.0, -1.0, 0.5]), mask,
                          mask.sum().item(), ref_logprobs=torch.randn(3, 8), kl_coef=0.1)
    loss.backward()
    assert (logprobs.grad[~mask] == 0).all() and (logprobs.grad[mask] != 0).all()


@pytest.mark.parametrize("G", (2, 3))
def test_the_expected_gradient_over_all_groups_is_that_of_the_policy_gradient(G):
    """A dialogue of two binary tokens x, y has four outcomes; all 4^G groups are enumerated with their
    probabilities.

    Without division by the standard deviation and with a fixed normaliser G, the baseline (1/G) sum_j r_j
    contains the dialogue's own reward, so E[gradient] = (1 - 1/G) grad J, where J = sum_xy p(x) p(y|x) r(x,
    y).
    """
    first = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[0.1, 0.6], [-0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    outcomes = list(product((0, 1), repeat=2))
    rewards = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): 0.7, (1, 1): 0.0}

    def logprobs(x, y):
        return torch.stack([first.log_softmax(-1)[x], second[x].log_softmax(-1)[y]])

    J = sum(logprobs(x, y).sum().exp() * rewards[x, y] for x, y in outcomes)
    exact = torch.autograd.grad(J, (first, second))
    expected = [torch.zeros_like(first), torch.zeros_like(second)]
    for group in product(outcomes, repeat=G):
        lp = torch.stack([logprobs(x, y) for x, y in group])                       # (B, T) = (G, 2)
        A = advantages(torch.tensor([[rewards[xy] for xy in group]], dtype=torch.float64),
                       divide_by_std=False)[0]
        loss, _ = policy_loss(lp, lp.detach(), A, torch.ones_like(lp).bool(), normaliser=G)
        probability = lp.detach().sum().exp()
        for total, gradient in zip(expected, torch.autograd.grad(loss, (first, second))):
            total -= probability * gradient                                  # the loss is minus the objective
    for mine, theirs in zip(expected, exact):
        assert torch.allclose(mine, (1 - 1 / G) * theirs, atol=1e-12)


def test_the_surrogates_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old, mask = -torch.rand(2, 4, generator=generator,
                            dtype=torch.float64), torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    logprobs = (old + 0.1 * torch.randn(2, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    ref, A = old - 0.2, torch.tensor([0.7, -1.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, A, mask, 4, 0.2, ref, 0.3)[0], (logprobs,))


def batch(model, B=6, T=10):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (B, T), generator=generator)
    mask = torch.zeros(B, T).bool()
    for row in range(B):
        mask[row, 2:4 + row] = True
    with torch.no_grad():
        old = token_logprobs(model, tokens, mask)
    return tokens, mask, old, torch.randn(B, generator=generator, dtype=torch.float64)


def small():
    return Transformer(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=32, num_attention_heads=2,
                                   num_key_value_heads=1, head_dim=8), seed=2).double()


def test_the_size_of_micro_batches_does_not_change_the_gradient():
    gradients = []
    for token_budget in (1, 20, 40, 1000):
        model = small()
        tokens, mask, old, A = batch(model)
        update(model, torch.optim.SGD(model.parameters(), lr=0.0), tokens, mask, old, A,
               token_budget=token_budget, max_grad_norm=1e9)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all(torch.allclose(g, gradients[0], rtol=1e-9, atol=1e-12)
               for g in gradients) and gradients[0].abs().sum() > 0


def test_the_first_step_after_a_rollout_has_ratio_one_and_clips_nothing_and_the_second_does_not():
    model = small()
    tokens, mask, old, A = batch(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = update(model, optimiser, tokens, mask, old, A, reference=small())
    assert first["ratio_max"] == pytest.approx(1, abs=1e-9) and first["clip_frac"] == 0
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    second = update(model, optimiser, tokens, mask, old, A, reference=small())
    assert second["ratio_max"] > 1.01 and second["kl"] > 0


def test_a_loss_that_is_not_finite_stops_before_the_weights_change():
    model = small()
    tokens, mask, old, A = batch(model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="gradient norm"):
        update(model, torch.optim.AdamW(model.parameters()), tokens, mask, old, A * float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_failed_dialogue_counts_in_no_mean_and_has_no_advantage():
    """[1, 0, NaN] is a group of two: mean 0.5, std 0.5; a group with one dialogue left teaches nothing."""
    nan = float("nan")
    A = advantages(torch.tensor([[1.0, 0.0, nan], [1.0, nan, nan], [nan, nan, nan], [1.0, 1.0, nan]]))
    assert A.tolist() == [[1.0, -1.0, 0.0], [0.0] * 3, [0.0] * 3, [0.0] * 3]
