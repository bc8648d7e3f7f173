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

from config import Parser, UserError, command

ON_TRACK, LOST = 0, 1


@dataclass(frozen=True)
class TabularDialogue:
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


def context_laws(dialogue: TabularDialogue, policy, user, horizon: int, start=None) -> np.ndarray:
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


def expected_return(dialogue: TabularDialogue, policy: np.ndarray, laws: np.ndarray, terminal=False) -> float:
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
    dialogue = TabularDialogue(np.array([1.0, 0.0]), next_context, np.array([[R, 0.0], [0.0, 0.0]]))
    careful, careless = (np.array([[1 - x, x], [1.0, 0.0]]) for x in (0.0, eps))
    clear, confusing = (np.array([[[1 - x, x]] * 2, [[1 - rho, rho]] * 2]) for x in (0.0, delta))
    return dialogue, careful, careless, clear, confusing


def random_pair(rng: np.random.Generator, C: int = 4, A: int = 3, U: int = 3):
    """Return a random dialogue, two pairs of speakers and the second's opening; it mixes the first's in."""
    mix = rng.random()
    pairs = [rng.dirichlet(np.ones(n), (2, *shape)) for n, shape in ((A, (C,)), (U, (C, A)), (C, ()))]
    (policy, policy2), (user, user2), (start, start2) = ((p, (1 - mix) * p + mix * q) for p, q in pairs)
    dialogue = TabularDialogue(start, rng.integers(C, size=(C, A, U)), rng.random((C, A)))
    return dialogue, policy, policy2, user, user2, start2


@command
def main() -> None:
    from extras.figures import draw_shift
    from extras.shift_tables import show
    parser = Parser("Compute exactly how the shift compounds over turns.")
    parser.add_argument("--horizons", type=int, nargs="+", default=[2, 5, 10, 20, 50, 100, 200, 500, 1000],
                        help="H, in turns")
    parser.add_argument("--eps", type=float, default=0.01, help="deviation per turn (default: 0.01)")
    parser.add_argument("--out", default=str(Path(__file__).parent / "assets"),
                        help="folder for shift_growth.csv and .png")
    args = parser.parse_args()
    path, horizons = Path(args.out) / "shift_growth.csv", sorted(set(args.horizons))
    try:
        check_between("eps", args.eps, 1e-9, 1)            # a smaller eps is lost in rounding
        check_between("horizon", horizons[0], 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w", encoding="utf-8", newline="")
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    curves = show(horizons, args.eps)
    with file:
        writer = csv.writer(file)
        writer.writerow(("panel", "curve", "x", "y"))
        writer.writerows((*key, x, f"{y:.8g}") for key, xy in curves.items() for x, y in zip(*xy))
    draw_shift(path)


if __name__ == "__main__":
    main()
