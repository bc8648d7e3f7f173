"""What shift_theory.py has to show: six tables, and the curves of the figure.

1. The gap grows like H^2 while H eps is small, then like H.
2. If a lost dialogue finds its way back, the shift levels off.
3. One early deviation costs more than a late one, unless the dialogue recovers.
4. Each method deviates from the deployed pair of speakers in its own factor.
5. A reward at the last turn alone makes the growth linear.
6. No bound is violated on random dialogues.

Run `python shift_theory.py` to print them.
"""

import numpy as np

from shift_theory import bound, compare, derailment, random_pair


def exponent(horizons, gaps) -> float:
    """Return the slope of log gap against log H."""
    return float(np.polyfit(np.log(horizons), np.log(gaps), 1)[0])


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


def table(title: str, columns: str, rows: list[tuple]) -> None:
    print(f"\n{title}")
    for row in (columns.split(), *rows):
        print("".join(f"{value:14.5f}" if isinstance(value, float) else f"{value:>14}" for value in row))


def show(horizons: list[int], eps: float) -> dict:
    """Print the tables and return the figure's curves, {(panel, curve): (x, y)}."""
    curves, small = {}, np.arange(50, 201, 25)

    # 1. The gap grows like H^2 while H eps is small, then like H
    runs = [compare(*derailment(eps), H) for H in horizons]
    every = [r["gap"] for r in runs]
    last = [compare(*derailment(eps), H, terminal=True)["gap"] for H in horizons]
    on_track = [bound(1, 0, np.full(H, eps), np.zeros(H)) for H in horizons]
    table(f"1. Derailment, eps = {eps:g} per turn",
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

    # 6. How far the bounds are from the truth
    table("6. 2,000 random dialogues of 6 turns: bound minus truth", "smallest median bound",
          [(f"{slack.min():.2e}", float(np.median(slack)), "  " + name)
           for name, slack in random_slacks(2000).items()])
    return curves
