"""Figures, drawn from CSV.

`draw_curves` shows, for every trained method, its score against its own user beside its score against the human. Where the
two part, the policy has learned the simulator and not the task.

Run `python plot.py` to redraw assets/curves.png from assets/curves.csv.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first: no screen is needed)

ASSETS = Path(__file__).parent / "assets"


def draw_curves(rows: list[dict], path: Path | str, scores: dict[str, float]) -> None:
    """Draw a panel a method from rows with method, step, reward, human_score and perhaps seed.

    A thin line a seed and their mean thick; `scores` gives the untrained policy's score under "base", drawn dotted.
    """
    methods = [m for m in ("static", "naive", "calibrated", "human") if any(row["method"] == m for row in rows)]
    if not methods:
        return
    figure, panels = plt.subplots(1, len(methods), figsize=(1 + 3.6 * len(methods), 3.4), sharey=True, squeeze=False)
    for panel, method in zip(panels[0], methods):
        for column, colour, style, label in (("reward", "tab:orange", "--", "its own user (training)"),
                                             ("human_score", "tab:blue", "-", "the human (validation)")):
            by_seed = {}
            for row in rows:
                if row["method"] == method and row[column] != "":
                    by_seed.setdefault(row.get("seed", "0"), {})[int(row["step"])] = float(row[column])
            for line in by_seed.values():
                panel.plot(line.keys(), line.values(), style, color=colour, linewidth=0.6, alpha=0.6)
            steps = sorted(set.intersection(*(set(line) for line in by_seed.values()))) if by_seed else []
            panel.plot(steps, [sum(line[s] for line in by_seed.values()) / len(by_seed) for s in steps], style, color=colour,
                       linewidth=2.2, label=label)
        if "base" in scores:
            panel.axhline(scores["base"], color="black", linestyle=":", linewidth=1, label="untrained policy, the human")
        panel.set(title=method, xlabel="step (rollout and update)", ylim=(-0.02, 1.02))
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("share of problems solved")
    panels[0][-1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
