r"""Why the shift compounds: a dialogue small enough to compute exactly, with NumPy alone.

A policy that was trained in one world and is used in another meets contexts that it was not trained on. A
world is a pair of speakers. At turn t = 0 .. H-1, with the context c, the policy acts by pi(a|c), the human
replies by h(u|c, a), and the next context is f(c, a, u); the context's distribution, or law, is d_t. In the
other world, marked ', another policy pi' acts (the one in the logs) or a simulator s replies. The distance of
laws is total variation, TV(p, q) = half the L1 distance; with L1 itself a factor 2 appears.

    shift        Delta_t = TV(d_t, d'_t)                            how far apart the contexts are
    deviation    eps_t   = E_{d'_t} TV(pi(.|c), pi'(.|c))           of the policies, averaged over contexts
                 delta_t = E_{d_t, pi} TV(h(.|c, a), s(.|c, a))     of the simulator from the human
    recurrence   Delta_{t+1} <= Delta_t + eps_t + delta_t           `recurrence`

Proof. A turn draws (c, a, u). Three swaps turn its law in one world into its law in the other. A swap costs
the distance of the two laws that are swapped, averaged over what stands before them:

    d_t  pi  h   ->   d_t  pi  s       the simulator replies for the human      delta_t
    d_t  pi  s   ->   d'_t pi  s       the contexts of the other world          Delta_t
    d'_t pi  s   ->   d'_t pi' s       the policy of the other world            eps_t

The costs add up, and f, which makes the next context of (c, a, u), cannot move laws further apart.

Theorem. With rewards r(c, a) between 0 and R, the returns J and J' of the two worlds differ by no more than

    every turn   R (H Delta_0 + sum_i [(H - i) eps_i + (H - 1 - i) delta_i])     `bound`
    last turn    R (Delta_0 + sum_i eps_i + sum_{i < H-1} delta_i)               `bound`, terminal

Proof. The reward of turn t depends on context and act, so the last two swaps bound its difference: R (Delta_t
+ eps_t). By the recurrence, Delta_t is at most Delta_0 plus all deviations before t. So a deviation of the
policy at turn i counts at turn i and at every later one, H - i times. The simulator's changes the reply,
which follows the act: it counts at the later turns only, H - 1 - i times. With a reward at every turn, a
constant eps costs eps (H + ... + 2 + 1), quadratic in H. With a reward at the last turn only, each deviation
counts once: eps H, linear in H.

Paper: Theorem 3.1 (arXiv 2605.26403) is "every turn" with Delta_0 = 0. Ours are:
1. The simulator's weight H - 1 - i instead of H - i, and Delta_0, for a simulator that writes the opening.
2. "last turn": the dialogues of train.py are rewarded at their end.
3. A sharper bound if Delta_0 = 0, "coupling": Delta_t <= 1 - prod_{i<t} (1 - e_i), where 1 - e_i = (1 - max_c
   TV(pi, pi')) (1 - max_{c, a} TV(h, s)): both worlds can draw acts and replies so that contexts that agree
   go on to agree with probability at least 1 - e_i.

Run `python shift_theory.py` for the table, assets/shift_growth.csv and assets/shift_growth.png.

Shapes: C contexts, A acts, U replies, H turns.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import Parser, UserError, script

ON_TRACK, LOST = 0, 1


@dataclass(frozen=True)
class Dialogue:
    """What does not depend on who talks."""
    start: np.ndarray           # (C,) law of the first context
    next_context: np.ndarray    # (C, A, U) the context that follows, f
    reward: np.ndarray          # (C, A) in [0, R]


def check_law(name: str, law: np.ndarray) -> np.ndarray:
    """Return the array, or raise a ValueError that names it if its last axis holds no distributions."""
    law = np.asarray(law, dtype=float)
    if not (law >= 0).all():
        raise ValueError(f"{name}: probabilities must be at least 0, got {law.min():.6g}")
    sums = law.sum(-1).ravel()
    worst = sums[np.abs(sums - 1).argmax()]
    if abs(worst - 1) > 1e-9:
        raise ValueError(f"{name}: probabilities must sum to 1, got a sum of {worst:.6g}")
    return law


def check_between(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def tv(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the distance along the last axis: tv([.5, .5, 0], [.2, .3, .5]) = (.3 + .2 + .5) / 2 = .5."""
    return 0.5 * np.abs(np.asarray(p) - np.asarray(q)).sum(-1)


def context_laws(dialogue: Dialogue, policy, user, horizon: int, start=None) -> np.ndarray:
    """Return d_0 .. d_{H-1} as (H, C). `start` (C,) replaces the dialogue's; `policy` may be (H, C, A)."""
    policy, user = check_law("policy", policy), check_law("user", user)
    law = check_law("start", dialogue.start if start is None else start)
    check_between("horizon", horizon, 1)
    policy = np.broadcast_to(policy, (horizon, *policy.shape[-2:]))
    laws = [law]
    for t in range(horizon - 1):
        joint = laws[-1][:, None, None] * policy[t][:, :, None] * user                         # (C, A, U)
        laws.append(np.bincount(dialogue.next_context.ravel(), joint.ravel(), minlength=len(law)))
    return np.array(laws)


def expected_return(dialogue: Dialogue, policy: np.ndarray, laws: np.ndarray, terminal=False) -> float:
    """Return J: the expected reward of all turns, or of the last one only."""
    by_turn = (laws[:, :, None] * policy * dialogue.reward).sum((1, 2))                        # (H,)
    return float(by_turn[-1] if terminal else by_turn.sum())


def recurrence(first: float, eps: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the recurrence's bounds on Delta_0 .. Delta_{H-1}, of which `first` is the first."""
    return first + np.concatenate([[0.0], np.cumsum(eps + delta)[:-1]])


def bound(R: float, first: float, eps: np.ndarray, delta: np.ndarray, terminal: bool = False) -> float:
    """Return the bound on |J - J'|; `first` is Delta_0. Paper: Theorem 3.1."""
    H = len(eps)
    weight = np.ones(H) if terminal else H - np.arange(H)
    user_weight = np.arange(H) < H - 1 if terminal else H - 1 - np.arange(H)
    return float(R * ((1 if terminal else H) * first + (weight * eps).sum() + (user_weight * delta).sum()))


def compare(dialogue, policy, policy2, user, user2, horizon, start2=None, terminal=False, R=1.0) -> dict:
    """Return shift, gap |J - J'| and bounds of two pairs of speakers; "coupling" holds for equal openings."""
    laws = context_laws(dialogue, policy, user, horizon)
    laws2 = context_laws(dialogue, policy2, user2, horizon, start2)
    shift, policy_tv, user_tv = tv(laws, laws2), tv(policy, policy2), tv(user, user2)
    eps, delta = (laws2 * policy_tv).sum(-1), (laws * (policy * user_tv).sum(-1)).sum(-1)      # (H,) each
    worst = 1 - (1 - policy_tv.max(-1)) * (1 - user_tv.max())             # e_i, for every turn or one for all
    agreeing = np.cumprod(1 - np.broadcast_to(worst, horizon))[:-1]                            # (H - 1,)
    J, J2 = (expected_return(dialogue, *pair, terminal) for pair in ((policy, laws), (policy2, laws2)))
    return {"shift": shift, "gap": abs(J - J2), "bound": bound(R, shift[0], eps, delta, terminal),
            "recurrence": recurrence(shift[0], eps, delta),
            "coupling": 1 - np.concatenate([[1.0], agreeing])}


def derailment(eps: float, delta: float = 0.0, rho: float = 0.0, R: float = 1.0):
    """Return a dialogue, a careful and a careless policy, a clear and a confusing user.

    Per turn, the careless policy loses a dialogue with probability eps, the confusing user with delta, and a
    lost one returns with probability rho, as after a clarifying question. A good act on track earns R.
    """
    for name, value in (("eps", eps), ("delta", delta), ("rho", rho)):
        check_between(name, value, 0, 1)
    next_context = np.array([[[ON_TRACK, LOST], [LOST, LOST]], [[LOST, ON_TRACK]] * 2])        # (C, A, U)
    dialogue = Dialogue(np.array([1.0, 0.0]), next_context, np.array([[R, 0.0], [0.0, 0.0]]))
    careful, careless = (np.array([[1 - x, x], [1.0, 0.0]]) for x in (0.0, eps))
    clear, confusing = (np.array([[[1 - x, x]] * 2, [[1 - rho, rho]] * 2]) for x in (0.0, delta))
    return dialogue, careful, careless, clear, confusing


def exponent(horizons, gaps) -> float:
    """Return the slope of log gap against log H."""
    return float(np.polyfit(np.log(horizons), np.log(gaps), 1)[0])


def random_pair(rng: np.random.Generator, C: int = 4, A: int = 3, U: int = 3):
    """Return a random dialogue, two pairs of speakers and the second's opening; it mixes the first's in."""
    mix = rng.random()
    pairs = [rng.dirichlet(np.ones(n), (2, *shape)) for n, shape in ((A, (C,)), (U, (C, A)), (C, ()))]
    (policy, policy2), (user, user2), (start, start2) = ((p, (1 - mix) * p + mix * q) for p, q in pairs)
    dialogue = Dialogue(start, rng.integers(C, size=(C, A, U)), rng.random((C, A)))
    return dialogue, policy, policy2, user, user2, start2


def random_slacks(count: int, seed: int = 0, H: int = 6) -> dict[str, np.ndarray]:
    """Return bound minus truth on random dialogues: per turn for the shift, per dialogue for the return."""
    rng, slacks = np.random.default_rng(seed), {}
    for _ in range(count):
        *pair, start2 = random_pair(rng)
        for terminal, name in ((False, "return, every turn"), (True, "return, last turn")):
            r = compare(*pair, H, start2=start2, terminal=terminal)
            slacks.setdefault(name, []).append(r["bound"] - r["gap"])
        slacks.setdefault("shift, recurrence", []).extend((r["recurrence"] - r["shift"])[1:])
        same = compare(*pair, H)
        slacks.setdefault("shift, coupling", []).extend((same["coupling"] - same["shift"])[1:])
    return {name: np.array(values) for name, values in slacks.items()}


# What to see ----------------------------------------------------------------------------------------------

def table(title: str, columns: str, rows: list[tuple]) -> None:
    print(f"\n{title}")
    for row in (columns.split(), *rows):
        print("".join(f"{value:14.5f}" if isinstance(value, float) else f"{value:>14}" for value in row))


def show(horizons: list[int], eps: float) -> dict:
    """Print tables 1 to 5 and return their curves, {(panel, curve): (x, y)}."""
    curves, small = {}, np.arange(50, 201, 25)

    # 1. The gap grows like H^2 while H eps is small, then like H
    runs = [compare(*derailment(eps), H) for H in horizons]
    every = [r["gap"] for r in runs]
    last = [compare(*derailment(eps), H, terminal=True)["gap"] for H in horizons]
    on_track = [bound(1, 0, np.full(H, eps), np.zeros(H)) for H in horizons]
    table(f"1. Derailment, eps = {eps:g} a turn",
          "H gap derailing_law on-track_law ratio Delta_{H-1} coupling",
          [(H, r["gap"], r["bound"], b, b / r["gap"], r["shift"][-1], r["coupling"][-1])
           for H, r, b in zip(horizons, runs, on_track)])
    for name, terminal in (("every turn", False), ("the last turn", True)):
        slope = exponent(small, [compare(*derailment(5e-5), H, terminal=terminal)["gap"] for H in small])
        print(f"  reward at {name}: exponent {slope:.3f}, H = 50 .. 200, eps = 5e-5")
    curves["1. derailment", "exact gap"] = horizons, every
    curves["1. derailment", "bound, on-track law"] = horizons, on_track

    # 2. If a lost dialogue returns with probability rho per turn, the shift levels off at eps / (eps + rho)
    runs = {rho: compare(*derailment(eps, rho=rho), 100) for rho in (0.0, 0.05, 0.2)}
    table(f"2. Recovery, eps = {eps:g}, H = 100", "rho Delta_{H-1} eps/(eps+rho) gap bound",
          [(rho, r["shift"][-1], eps / (eps + rho), r["gap"], r["bound"]) for rho, r in runs.items()])
    curves |= {("2. recovery", f"rho = {rho:g}"): (range(100), r["shift"]) for rho, r in runs.items()}

    # 3. A deviation at turn i alone costs (H - i) eps, unless the dialogue recovers
    costs = {"weight (H - i) eps": [(20 - i) * eps for i in range(20)]}
    for rho in (0.0, 0.2):
        dialogue, careful, careless, clear, _ = derailment(eps, rho=rho)
        policies = np.where(np.eye(20, dtype=bool)[:, :, None, None], careless, careful)       # (H, H, C, A)
        costs[f"gap, rho = {rho:g}"] = [compare(dialogue, careful, policy2, clear, clear, 20)["gap"]
                                        for policy2 in policies]
    table("3. Where one deviation hurts, H = 20", "turn_i weight rho=0 rho=0.2",
          [(i, *(cost[i] for cost in costs.values())) for i in (0, 10, 19)])
    curves |= {("3. one deviation", name): (range(20), cost) for name, cost in costs.items()}

    # 4. Each method deviates from the deployed pair in its own factor; the last row shifts the opening
    rows = []
    for name, a, b, first in (("static", eps, 0.0, 0.0), ("naive", 0.0, eps, 0.0),
                              ("calibrated", 0.0, eps / 5, 0.0), ("none", 0.0, 0.0, 0.0),
                              ("opening", 0.0, 0.0, eps)):
        runs = [compare(*derailment(a, b), H, start2=np.array([1 - first, first])) for H in horizons]
        rows.append((name, a, b, first, runs[-1]["shift"][-1], runs[-1]["gap"], runs[-1]["bound"]))
        if name != "opening":
            curves["4a. four methods: shift", name] = range(horizons[-1]), runs[-1]["shift"]
        if name not in ("opening", "none"):
            curves["4b. four methods: gap", name] = horizons, [r["gap"] for r in runs]
    table(f"4. Four methods and a shifted opening, H = {horizons[-1]}",
          "method eps_0 delta_0 Delta_0 Delta_{H-1} gap bound", rows)

    # 5. The same dialogue, rewarded at every turn or at the last one only
    table("5. Where the reward is: the gap", "H every_turn last_turn", list(zip(horizons, every, last)))
    curves["5. where the reward is", "every turn"] = horizons, every
    curves["5. where the reward is", "last turn"] = horizons, last
    return curves


@script
def main() -> None:
    parser = Parser("Compute exactly how the shift compounds over turns.")
    parser.add_argument("--horizons", type=int, nargs="+", default=[2, 5, 10, 20, 50, 100, 200, 500, 1000],
                        help="H, in turns")
    parser.add_argument("--eps", type=float, default=0.01, help="deviation per turn (default: 0.01)")
    parser.add_argument("--out", default=str(Path(__file__).parent / "assets"),
                        help="folder for shift_growth.csv and .png")
    args = parser.parse_args()
    path, horizons = Path(args.out) / "shift_growth.csv", sorted(set(args.horizons))
    try:
        check_between("eps", args.eps, 1e-9, 1)            # below, nothing deviates that doubles can show
        check_between("horizon", horizons[0], 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w", encoding="utf-8", newline="")
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    curves = show(horizons, args.eps)
    table("6. 2,000 random dialogues of 6 turns: bound minus truth", "smallest median bound",
          [(f"{slack.min():.2e}", float(np.median(slack)), "  " + name)
           for name, slack in random_slacks(2000).items()])
    with file:
        writer = csv.writer(file)
        writer.writerow(("panel", "curve", "x", "y"))
        writer.writerows((*key, x, f"{y:.8g}") for key, xy in curves.items() for x, y in zip(*xy))
    from extras.figures import draw_shift
    draw_shift(path)


if __name__ == "__main__":
    main()
