r"""Why the shift compounds: a dialogue small enough to compute exactly, with NumPy alone.

A tabular dialogue has contexts c, assistant acts a and user replies u; the next context is f(c, a, u). A
policy pi(a|c) and a user h(u|c, a) give the law d_t of the context at turn t = 0 .. H-1. Another pair (pi',
s), a policy that wrote the logs or a simulator, gives d'_t. All distances are total variations, TV(p, q) =
half the L1 distance; with L1 a factor 2 appears.

    shift        Delta_t = TV(d_t, d'_t)
    deviation    eps_t   = E_{d'_t} TV(pi(.|c), pi'(.|c))                  policy-induced
                 delta_t = E_{d_t, pi} TV(h(.|c, a), s(.|c, a))            simulator-induced
    recurrence   Delta_{t+1} <= Delta_t + eps_t + delta_t                  `recurrence`

Proof. Call P_t = d_t pi h and P'_t = d'_t pi' s the laws of (c, a, u). Swap one factor at a time:
TV(P_t, P'_t) <= TV(d_t pi h, d_t pi s) + TV(d_t pi, d'_t pi) + TV(d'_t pi, d'_t pi') = delta_t + Delta_t +
eps_t, and the map f cannot increase a distance.

    every turn   |J - J'| <= R (H Delta_0 + sum_i [(H - i) eps_i + (H - 1 - i) delta_i])     `bound`
    last turn    |J - J'| <= R (Delta_0 + sum_i eps_i + sum_{i < H-1} delta_i)               `bound`, terminal

Proof. A reward r(c, a) in [0, R] at turn t differs by at most R TV(d_t pi, d'_t pi') <= R (Delta_t + eps_t).
Unroll the recurrence and sum over the rewarded turns. So a constant deviation costs O(H^2) only if every turn
is rewarded.

Paper: Theorem 3.1 (arXiv 2605.26403) is the first line with Delta_0 = 0. Ours are the simulator's weight (its
reply counts from the next turn on), the term of an opening that the simulator writes, the last-turn bound,
and the sharper one:

    coupling     Delta_t <= 1 - prod_{i < t} (1 - e_i)  if Delta_0 = 0                        `coupling_bound`
                 with 1 - e_i = (1 - max_c TV(pi, pi')) (1 - max_{c, a} TV(h, s))

Proof. Run both dialogues on one coin. While their contexts agree, maximal couplings let act and reply agree
with probability at least 1 - e_i. So the contexts still agree at t with probability at least the product, and
TV <= P(they differ).

Run `python shift_theory.py` for the table, assets/shift_growth.csv and assets/shift_growth.png.

Shapes: C contexts, A acts, U replies, H turns.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ON_TRACK, LOST = 0, 1


@dataclass(frozen=True)
class Dialogue:
    """What does not depend on who talks."""
    start: np.ndarray           # (C,) law of the first context
    next_context: np.ndarray    # (C, A, U) the context that follows, f
    reward: np.ndarray          # (C, A) in [0, R]


def check_law(name: str, law: np.ndarray) -> np.ndarray:
    """Return the array if its last axis holds distributions.

    Raises: ValueError naming the argument and the offending value.
    """
    law = np.asarray(law, dtype=float)
    if not (law >= 0).all():
        raise ValueError(f"{name}: probabilities must be at least 0, got {law.min():.6g}")
    sums = law.sum(-1).ravel()
    worst = sums[np.abs(sums - 1).argmax()]
    if abs(worst - 1) > 1e-9:
        raise ValueError(f"{name}: probabilities must sum to 1, got a sum of {worst:.6g}")
    return law


def check_between(name: str, value: float, low: float, high: float = float("inf")) -> float:
    """Return the value, or raise a ValueError that names it."""
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")
    return value


def tv(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Total variation along the last axis: tv([0.5, 0.5, 0], [0.2, 0.3, 0.5]) is 0.5, half of |0.3| +
    |0.2| + |-0.5|.
    """
    return 0.5 * np.abs(np.asarray(p) - np.asarray(q)).sum(-1)


def context_laws(dialogue: Dialogue, policy: np.ndarray, user: np.ndarray, horizon: int,
                 start=None) -> np.ndarray:
    """Return d_t for t = 0 .. H-1 as (H, C), by forward recursion. `policy` (C, A), or (H, C, A) if it
    changes by turn; `user` (C, A, U); `start` (C,) replaces the dialogue's opening.

    Raises: ValueError if a law does not sum to 1 or the horizon is below 1.
    """
    policy, user = check_law("policy", policy), check_law("user", user)
    law = check_law("start", dialogue.start if start is None else start)
    policy = np.broadcast_to(policy, (check_between("horizon", horizon, 1), *policy.shape[-2:]))
    laws = [law]
    for t in range(horizon - 1):
        joint = laws[-1][:, None, None] * policy[t][:, :, None] * user                         # (C, A, U)
        laws.append(np.bincount(dialogue.next_context.ravel(), joint.ravel(), minlength=len(law)))
    return np.array(laws)


def expected_return(dialogue: Dialogue, policy: np.ndarray, laws: np.ndarray,
                    terminal: bool = False) -> float:
    """Return J: the expected reward of all turns, or of the last one only."""
    by_turn = (laws[:, :, None] * policy * dialogue.reward).sum((1, 2))                        # (H,)
    return float(by_turn[-1] if terminal else by_turn.sum())


def deviations(policy, policy2, user, user2, laws, laws2) -> tuple[np.ndarray, np.ndarray]:
    """Return eps_t and delta_t, each (H,), in the order of the proof: policies under d'_t, users under d_t
    and pi.
    """
    eps = (laws2 * tv(policy, policy2)).sum(-1)
    delta = (laws * (policy * tv(user, user2)).sum(-1)).sum(-1)
    return eps, delta


def recurrence(first: float, eps: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the bounds on Delta_0 .. Delta_{H-1} that the recurrence gives. Paper: Theorem 3.1, by
    induction.
    """
    return first + np.concatenate([[0.0], np.cumsum(eps + delta)[:-1]])


def bound(R: float, first: float, eps: np.ndarray, delta: np.ndarray, terminal: bool = False) -> float:
    """Return the bound on |J - J'|. Paper: Theorem 3.1 for a reward at every turn; last turn, delta and
    `first` are ours.
    """
    H = len(eps)
    weight = np.ones(H) if terminal else H - np.arange(H)
    user_weight = np.arange(H) < H - 1 if terminal else H - 1 - np.arange(H)
    return float(R * ((1 if terminal else H) * first + (weight * eps).sum() + (user_weight * delta).sum()))


def coupling_bound(suprema: np.ndarray) -> np.ndarray:
    """Return 1 - prod_{i<t} (1 - e_i) for t = 0 .. H-1 from e_0 .. e_{H-1}. Ours; it never exceeds 1."""
    return 1 - np.concatenate([[1.0], np.cumprod(1 - suprema)[:-1]])


def derailment(eps: float, delta: float = 0.0, rho: float = 0.0, R: float = 1.0):
    """A dialogue that is on track or lost. Return it with a careful and a careless policy, a clear and a
    confusing user.

    A careless policy errs with probability eps a turn, a confusing user derails with probability delta; a
    lost dialogue returns with probability rho, as after a clarifying question. Every good act on track earns
    R.
    """
    for name, value in (("eps", eps), ("delta", delta), ("rho", rho)):
        check_between(name, value, 0, 1)
    # [c, a, u]
    next_context = np.array([[[ON_TRACK, LOST], [LOST, LOST]], [[LOST, ON_TRACK], [LOST, ON_TRACK]]])
    dialogue = Dialogue(np.array([1.0, 0.0]), next_context, np.array([[R, 0.0], [0.0, 0.0]]))
    careful, careless = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1 - eps, eps], [1.0, 0.0]])
    clear, confusing = (np.array([[[1 - x, x]] * 2, [[1 - rho, rho]] * 2]) for x in (0.0, delta))
    return dialogue, careful, careless, clear, confusing


def compare(dialogue: Dialogue, policy, policy2, user, user2, horizon: int, start2=None,
            terminal: bool = False, R: float = 1.0) -> dict:
    """Return the shift, the gap |J - J'| and every bound for two pairs of speakers; the coupling bound
    holds for equal openings only.
    """
    laws = context_laws(dialogue, policy, user, horizon)
    laws2 = context_laws(dialogue, policy2, user2, horizon, start2)
    shift = tv(laws, laws2)
    eps, delta = deviations(policy, policy2, user, user2, laws, laws2)
    worst = 1 - (1 - tv(policy, policy2).max(-1)) * (1 - tv(user, user2).max())
    J, J2 = (expected_return(dialogue, *pair, terminal) for pair in ((policy, laws), (policy2, laws2)))
    return {"shift": shift, "eps": eps, "delta": delta, "gap": abs(J - J2),
            "bound": bound(R, shift[0], eps, delta, terminal),
            "recurrence": recurrence(shift[0], eps, delta),
            "coupling": coupling_bound(np.broadcast_to(worst, horizon))}


def exponent(horizons, gaps) -> float:
    """Return the slope of log gap against log H."""
    return float(np.polyfit(np.log(horizons), np.log(gaps), 1)[0])


# What to see: each function prints its table and returns curves, {(panel, curve): (x, y)} -------------------

def table(title: str, columns: str, rows: list[tuple]) -> None:
    print(f"\n{title}\n" + "".join(f"{name:>14}" for name in columns.split()))
    for row in rows:
        print("".join(f"{value:14.5f}" if isinstance(value, float) else f"{value:>14}" for value in row))


def show_derailment(horizons: list[int], eps: float) -> dict:
    """1. The gap grows like H^2 while H * eps is small, then like H; the bound under the derailing law is
    exact.
    """
    rows = []
    for H in horizons:
        dialogue, careful, careless, clear, _ = derailment(eps)
        r = compare(dialogue, careful, careless, clear, clear, H)
        on_track = bound(1, 0, np.full(H, eps), np.zeros(H))
        rows.append((H, r["gap"], r["bound"], on_track, on_track / r["gap"], float(r["shift"][-1]),
                     float(r["coupling"][-1])))
    table(f"1. Derailment, eps = {eps:g} a turn",
          "H gap derailing_law on-track_law ratio Delta_{H-1} coupling", rows)
    small, (dialogue, careful, careless, clear, _) = np.arange(50, 201, 25), derailment(5e-5)
    for name, terminal in (("every turn", False), ("the last turn", True)):
        gaps = [compare(dialogue, careful, careless, clear, clear, H, terminal=terminal)["gap"]
                for H in small]
        print(f"  reward at {name}: exponent {exponent(small, gaps):.3f}, H = 50 .. 200, eps = 5e-5")
    return {("1. derailment", "exact gap"): (horizons, [row[1] for row in rows]),
            ("1. derailment", "bound, on-track law"): (horizons, [row[3] for row in rows])}


def show_recovery(H: int, eps: float) -> dict:
    """2. If a lost dialogue returns with probability rho a turn, the shift levels off at eps / (eps +
    rho).
    """
    rows, curves = [], {}
    for rho in (0.0, 0.05, 0.2):
        dialogue, careful, careless, clear, _ = derailment(eps, rho=rho)
        r = compare(dialogue, careful, careless, clear, clear, H)
        rows.append((rho, float(r["shift"][-1]), eps / (eps + rho), r["gap"], r["bound"]))
        curves["2. recovery", f"rho = {rho:g}"] = (range(H), r["shift"])
    table(f"2. Recovery, eps = {eps:g}, H = {H}", "rho Delta_{H-1} eps/(eps+rho) gap bound", rows)
    return curves


def show_where(H: int, eps: float) -> dict:
    """3. One deviation at turn i only: an early one costs (H - i) eps, unless the dialogue recovers."""
    weights = [(H - i) * eps for i in range(H)]
    curves = {("3. one deviation", "weight (H - i) eps"): (range(H), weights)}
    for rho in (0.0, 0.2):
        dialogue, careful, careless, clear, _ = derailment(eps, rho=rho)
        policies = [np.where((np.arange(H) == i)[:, None, None], careless, careful) for i in range(H)]
        curves["3. one deviation", f"gap, rho = {rho:g}"] = (
            range(H), [compare(dialogue, careful, policy2, clear, clear, H)["gap"] for policy2 in policies])
    gaps = [y for _, y in curves.values()]
    table(f"3. Where one deviation hurts, H = {H}", "turn_i weight rho=0 rho=0.2",
          [(i, *(y[i] for y in gaps)) for i in (0, H // 2, H - 1)])
    return curves


def show_methods(horizons: list[int], eps: float) -> dict:
    """4. Four ways to train: each deviates from the deployed pair in its own factor. Below them, an
    opening that shifts.
    """
    rows, curves = [], {}
    for name, a, b, first in (("static", eps, 0.0, 0.0), ("naive", 0.0, eps, 0.0),
                              ("calibrated", 0.0, eps / 5, 0.0),
                              ("none", 0.0, 0.0, 0.0), ("opening", 0.0, 0.0, eps)):
        dialogue, careful, careless, clear, confusing = derailment(a, b)
        results = [compare(dialogue, careful, careless, clear, confusing, H,
                           start2=np.array([1 - first, first])) for H in horizons]
        r = results[-1]
        rows.append((name, a, b, first, float(r["shift"][-1]), r["gap"], r["bound"]))
        if name != "opening":
            curves["4a. four methods: shift", name] = (range(horizons[-1]), r["shift"])
        if name not in ("opening", "none"):
            curves["4b. four methods: gap", name] = (horizons, [x["gap"] for x in results])
    table(f"4. Four methods and a shifted opening, H = {horizons[-1]}",
          "method eps_0 delta_0 Delta_0 Delta_{H-1} gap bound", rows)
    return curves


def show_terminal(horizons: list[int], eps: float) -> dict:
    """5. The same dialogue, rewarded at every turn or at the last one only."""
    dialogue, careful, careless, clear, _ = derailment(eps)
    every, last = ([compare(dialogue, careful, careless, clear, clear, H, terminal=terminal)["gap"]
                    for H in horizons]
                   for terminal in (False, True))
    table("5. Where the reward is: the gap", "H every_turn last_turn",
          [(H, every[i], last[i]) for i, H in enumerate(horizons)])
    return {("5. where the reward is", "every turn"): (horizons, every),
            ("5. where the reward is", "last turn"): (horizons, last)}


def random_pair(rng: np.random.Generator, C: int = 4, A: int = 3, U: int = 3):
    """Return a random dialogue with two pairs of speakers, the second pair a mixture of the first and
    something else.
    """
    mix = rng.random()
    policy, other = rng.dirichlet(np.ones(A), (2, C))
    user, other_user = rng.dirichlet(np.ones(U), (2, C, A))
    start, other_start = rng.dirichlet(np.ones(C), 2)
    dialogue = Dialogue(start, rng.integers(C, size=(C, A, U)), rng.random((C, A)))
    return (dialogue, policy, (1 - mix) * policy + mix * other, user, (1 - mix) * user + mix * other_user,
            (1 - mix) * start + mix * other_start)


def random_slacks(count: int, seed: int = 0, H: int = 6) -> dict[str, np.ndarray]:
    """Return bound minus truth on random dialogues: per turn for the shift, per dialogue for the return."""
    rng, slacks = np.random.default_rng(seed), {}
    for _ in range(count):
        dialogue, policy, policy2, user, user2, start2 = random_pair(rng)
        for terminal in (False, True):
            r = compare(dialogue, policy, policy2, user, user2, H, start2=start2, terminal=terminal)
            slacks.setdefault("return, last turn" if terminal else "return, every turn",
                              []).append(r["bound"] - r["gap"])
        slacks.setdefault("shift, recurrence", []).extend((r["recurrence"] - r["shift"])[1:])
        same = compare(dialogue, policy, policy2, user, user2, H)
        slacks.setdefault("shift, coupling", []).extend((same["coupling"] - same["shift"])[1:])
    return {name: np.array(values) for name, values in slacks.items()}


def draw_figure(curves: dict, path: Path) -> None:
    """Draw a panel a group of curves; every curve has its own dash, so that the figure reads in black and
    white.
    """
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.6))
    for panel, title in zip(panels.flat, dict.fromkeys(group for group, _ in curves)):
        members = [(curve, xy) for (group, curve), xy in curves.items() if group == title]
        shift, by_turn = title.endswith(("recovery", "shift")), isinstance(members[0][1][0], range)
        for (curve, (x, y)), dash, width in zip(members, ("-", "--", ":", "-."), (4.0, 1.6, 2.4, 1.4)):
            panel.plot(list(x), list(y), dash, color="0.6" if dash == "-" else "black", linewidth=width,
                       label=curve)
        if not by_turn:
            x, y = (np.array(v, float) for v in members[0][1])
            for slope in (1, 2):
                guide = 0.5 * y[0] * (x / x[0]) ** slope
                panel.plot(x, guide, color="0.8", linewidth=1, zorder=0)
                panel.annotate(f"slope {slope}", (x[-1], guide[-1]), color="0.45", fontsize=8, ha="right",
                               va="top")
            panel.set(xscale="log", yscale="log")
        panel.set(title=title, xlabel="turn" if by_turn else "horizon H (turns)", ylabel="shift $\\Delta_t$"
                  if shift else "gap in return (R)")
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute exactly how the shift compounds over turns.",
                                     allow_abbrev=False)
    parser.add_argument("--horizons", type=int, nargs="+", default=[2, 5, 10, 20, 50, 100, 200, 500, 1000],
                        help="H, in turns")
    parser.add_argument("--eps", type=float, default=0.01,
                        help="deviation a turn, a total variation (default: 0.01)")
    parser.add_argument("--out", default=str(Path(__file__).parent / "assets"),
                        help="folder for shift_growth.csv and .png")
    parser.error = fail
    args = parser.parse_args()
    try:
        check_between("eps", args.eps, 1e-9, 1)                # below, nothing deviates that doubles can show
        horizons = sorted({check_between("horizon", H, 1) for H in args.horizons})
        Path(args.out).mkdir(parents=True, exist_ok=True)
        curves = (show_derailment(horizons, args.eps) | show_recovery(100, args.eps)
                  | show_where(20, args.eps)
                  | show_methods(horizons, args.eps) | show_terminal(horizons, args.eps))
        table("6. 2,000 random dialogues of 6 turns: bound minus truth", "smallest median bound",
              [(f"{slack.min():.2e}", float(np.median(slack)), "  " + name) for name,
               slack in random_slacks(2000).items()])
        with open(Path(args.out) / "shift_growth.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("panel", "curve", "x", "y"))
            writer.writerows((*key, x, f"{y:.8g}") for key, xy in curves.items() for x, y in zip(*xy))
        draw_figure(curves, Path(args.out) / "shift_growth.png")
    except (ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"shift_theory.py: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
