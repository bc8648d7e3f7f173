"""The theory file: bounds that hold, equality where it is claimed, and exact numbers against sampling."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from extras.shift_tables import exponent, random_slacks
from shift_theory import (TabularDialogue, bound, compare, context_laws, derailment, expected_return,
                          random_pair, recurrence, tv)

SCRIPT = Path(__file__).parent.parent / "shift_theory.py"


def test_total_variation_by_hand_is_half_the_l1_distance():
    p, q = [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]
    assert tv(p, q) == pytest.approx(0.5)
    assert np.abs(np.subtract(p, q)).sum() == pytest.approx(2 * tv(p, q))
    assert tv([1, 0], [0, 1]) == 1 and tv(p, p) == 0


def test_no_bound_is_violated_on_hundreds_of_random_dialogues():
    for name, slack in random_slacks(400, seed=1).items():
        assert slack.min() > -1e-12, name


@pytest.mark.parametrize("eps", (0.001, 0.1, 0.5, 1.0))
@pytest.mark.parametrize("H", (1, 2, 7, 50))
def test_derailment_attains_the_bound_and_the_coupling_bound(eps, H):
    """The gap is R sum_t (1 - (1 - eps)^(t+1)), and the shift 1 - (1 - eps)^t."""
    dialogue, careful, careless, clear, _ = derailment(eps, R=3.0)
    r = compare(dialogue, careful, careless, clear, clear, H, R=3.0)
    t = np.arange(H)
    assert r["gap"] == pytest.approx(3 * (1 - (1 - eps) ** (t + 1)).sum(), rel=1e-12)
    assert r["bound"] == pytest.approx(r["gap"], rel=1e-12)
    assert np.allclose(r["shift"], 1 - (1 - eps) ** t, atol=1e-12)
    for name in ("coupling", "recurrence"):
        assert np.allclose(r[name], r["shift"], atol=1e-12)


def test_the_bound_under_the_on_track_law_is_tight_only_for_small_h_times_eps():
    ratios = []
    for eps in (1e-2, 1e-3, 1e-4):
        dialogue, careful, careless, clear, _ = derailment(eps)
        r = compare(dialogue, careful, careless, clear, clear, 20)
        ratios.append(bound(1, 0, np.full(20, eps), np.zeros(20)) / r["gap"])
    assert ratios[0] > ratios[1] > ratios[2] > 1 and ratios[2] < 1.001


def test_nothing_shifts_when_policies_agree_and_the_simulator_is_the_human():
    dialogue, policy, _, user, _, _ = random_pair(np.random.default_rng(0))
    r = compare(dialogue, policy, policy, user, user, 9)
    assert r["gap"] == r["bound"] == 0 and not r["shift"].any() and not r["coupling"].any()


@pytest.mark.parametrize("terminal, slope", ((False, 2), (True, 1)))
def test_the_fitted_exponent_is_two_with_a_reward_at_every_turn_and_one_at_the_last(terminal, slope):
    dialogue, careful, careless, clear, _ = derailment(5e-5)
    horizons = range(50, 201, 10)
    gaps = [compare(dialogue, careful, careless, clear, clear, H, terminal=terminal)["gap"] for H in horizons]
    assert exponent(horizons, gaps) == pytest.approx(slope, abs=0.05)


@pytest.mark.parametrize("rho", (0.05, 0.3))
def test_recovery_levels_the_shift_off_at_its_limit_and_the_gap_grows_linearly(rho):
    dialogue, careful, careless, clear, _ = derailment(0.02, rho=rho)
    r = compare(dialogue, careful, careless, clear, clear, 2000)
    assert r["shift"][-1] == pytest.approx(0.02 / (0.02 + rho), rel=1e-9)
    gaps = [compare(dialogue, careful, careless, clear, clear, H)["gap"] for H in (1000, 2000, 4000)]
    assert exponent((1000, 2000, 4000), gaps) == pytest.approx(1, abs=0.05)


def test_one_deviation_at_turn_i_costs_h_minus_i():
    dialogue, careful, careless, clear, _ = derailment(0.1)
    for i in range(8):
        policy2 = np.where((np.arange(8) == i)[:, None, None], careless, careful)
        assert compare(dialogue, careful, policy2, clear, clear, 8)["gap"] == pytest.approx(0.1 * (8 - i))


def test_the_users_deviation_counts_from_the_turn_after():
    """A simulator that derails at turn i < H - 1 costs the H - 1 - i turns that follow; at the last turn
    it costs nothing.
    """
    dialogue, careful, _, clear, confusing = derailment(0.0, delta=1.0)
    assert compare(dialogue, careful, careful, clear, confusing, 1)["gap"] == 0
    r = compare(dialogue, careful, careful, clear, confusing, 5)
    assert r["gap"] == 4 and bound(1, 0, np.zeros(5), np.array([1.0, 0, 0, 0, 0])) == 4


def test_a_simulator_that_writes_the_opening_adds_its_shift_at_every_turn():
    dialogue, careful, _, clear, _ = derailment(0.0)
    r = compare(dialogue, careful, careful, clear, clear, 6, start2=np.array([0.7, 0.3]))
    assert r["gap"] == pytest.approx(6 * 0.3) and r["bound"] == pytest.approx(6 * 0.3)
    assert np.allclose(recurrence(0.3, np.zeros(6), np.zeros(6)), r["shift"])


def test_exact_laws_and_returns_agree_with_monte_carlo():
    """100,000 sampled dialogues; the return's mean within 5 standard errors, context shares within 0.01."""
    rng = np.random.default_rng(0)
    dialogue, policy, _, user, _, _ = random_pair(rng)
    H, n = 5, 100_000
    laws = context_laws(dialogue, policy, user, H)
    draw = lambda p: (p.cumsum(-1) < rng.random((n, 1))).sum(-1).clip(max=p.shape[-1] - 1)  # noqa: E731
    c, total = draw(np.tile(dialogue.start, (n, 1))), np.zeros(n)
    for t in range(H):
        assert np.abs(np.bincount(c, minlength=4) / n - laws[t]).max() < 0.01
        a = draw(policy[c])
        u = draw(user[c, a])
        total += dialogue.reward[c, a]
        c = dialogue.next_context[c, a, u]
    assert abs(total.mean() - expected_return(dialogue, policy, laws)) < 5 * total.std() / n ** 0.5


def test_laws_that_do_not_sum_to_one_and_bad_numbers_are_named():
    dialogue, careful, careless, clear, _ = derailment(0.1)
    with pytest.raises(ValueError, match="policy: .* got a sum of 1.5"):
        context_laws(dialogue, careful * 1.5, clear, 3)
    with pytest.raises(ValueError, match="user: .* got -1"):
        context_laws(dialogue, careful, clear - np.array([1.0, -1.0]) * 2, 3)
    with pytest.raises(ValueError, match="start: .* got a sum of 0"):
        context_laws(TabularDialogue(np.zeros(2), dialogue.next_context, dialogue.reward), careful, clear, 3)
    with pytest.raises(ValueError, match=r"eps must lie in \[0, 1\], got 1.5"):
        derailment(1.5)
    with pytest.raises(ValueError, match=r"horizon must lie in \[1, inf\], got 0"):
        context_laws(dialogue, careful, clear, 0)


@pytest.mark.parametrize("arguments, message", [("--eps 2", "eps must lie in [1e-09, 1], got 2.0"),
                                                ("--horizons 5 0", "horizon must lie in [1, inf], got 0"),
                                                ("--eps x", "invalid float value: 'x'"),
                                                ("--esp 1", "unrecognized arguments")])
def test_bad_input_is_one_clear_line_and_exit_code_2(tmp_path, arguments, message):
    done = subprocess.run([sys.executable, SCRIPT, *arguments.split(), "--out", str(tmp_path / "out")],
                          capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
