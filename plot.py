"""The table and the figures.

`draw_curves` shows, for every trained method, its score against its own user beside its score against the
human. Where the two part, the policy has learned the simulator and not the task.

Run `python plot.py` to redraw every figure, assets/NAMEcurves.png, from assets/NAMEcurves.csv and
assets/NAMEresults.csv; `python plot.py --record RUN RUN ...` first writes those, and
assets/NAMEreport_card.csv, from finished runs. NAME is empty for the embedded world; `--name smollm2_` keeps
other runs beside it.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first: no screen is needed)

ASSETS = Path(__file__).parent / "assets"
METHODS = ("base", "static", "naive", "calibrated", "human")
PAPER = {"base": 82.3, "static": 85.0, "naive": 89.3, "calibrated": 91.5}    # MATH accuracy, arXiv 2605.26403


def read_csv(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def print_table(results: dict[str, dict], show_recorded: bool) -> None:
    """Print a run's scores and the paper's, and the recorded ones of methods that the run left out."""
    recorded = {}
    for row in read_csv(ASSETS / "results.csv") if show_recorded else []:
        recorded.setdefault(row["method"], []).append(float(row["score"]))
    layout = "{:12s}{:>20s}{:>18s}{:>8s}{:>10s}{:>14s}"
    print()
    print(layout.format("method", "against the human", "95 % interval", "turns", "seconds", "paper, MATH"))
    for method in dict.fromkeys([*METHODS, *results]):
        paper = f"{PAPER[method]:.1f}" if method in PAPER else "-"
        if method in results:
            r = results[method]
            interval = f"[{100 * r['ci'][0]:.1f}, {100 * r['ci'][1]:.1f}]"
            print(layout.format(method, f"{100 * r['score']:.1f}", interval, f"{r['turns']:.2f}",
                                f"{r['seconds']:.0f}", paper))
        elif method in recorded:
            score = sum(recorded[method]) / len(recorded[method])
            print(layout.format(method, f"{100 * score:.1f} (recorded)", "-", "-", "-", paper))
    print("Per cent solved" + (", a tiny model with a scripted human" if show_recorded else "")
          + "; the paper's: Gemma-3-4B-IT on MATH-Chat.")


def draw_curves(rows: list[dict], path: Path | str, base: float | None) -> None:
    """Draw a panel a method from rows with method, step, reward, human_score and perhaps seed.

    A thin line a seed and their mean thick; `base`, the untrained policy's score, is dashed.
    """
    methods = [m for m in ("static", "naive", "calibrated", "human")
               if any(row["method"] == m for row in rows)]
    if not methods:
        return
    figure, panels = plt.subplots(1, len(methods), figsize=(1 + 3.6 * len(methods), 3.4), sharey=True,
                                  squeeze=False)
    for panel, method in zip(panels[0], methods):
        for column, colour, style, label in (("reward", "tab:orange", ":", "its own user (training)"),
                                             ("human_score", "tab:blue", "-", "the human (validation)")):
            by_seed = {}
            for row in rows:
                if row["method"] == method and row[column] != "":
                    by_seed.setdefault(row.get("seed", "0"), {})[int(row["step"])] = float(row[column])
            for line in by_seed.values():
                panel.plot(line.keys(), line.values(), style, color=colour, linewidth=0.6, alpha=0.6)
            steps = sorted(set.intersection(*(set(line) for line in by_seed.values()))) if by_seed else []
            panel.plot(steps, [sum(line[s] for line in by_seed.values()) / len(by_seed) for s in steps],
                       style, color=colour, linewidth=2.2, label=label)
        if base is not None:
            panel.axhline(base, color="black", linestyle="--", linewidth=1,
                          label="untrained policy, the human")
        panel.set(title=method, xlabel="step (rollout and update)", ylim=(-0.02, 1.02))
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("share of problems solved")
    panels[0][-1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def record(runs: list[str], prefix: str) -> None:
    """Collect the figures of finished runs into the committed CSV files.

    Raises: ValueError if one is not a finished run, of all methods in the embedded world.
    """
    results, cards, curves = [], [], []
    for run in map(Path, runs):
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        missing = set(METHODS) - set(result.get("methods", {}) if isinstance(result, dict) else {})
        if missing and not prefix or len(missing) == len(METHODS):
            raise ValueError(f"{run} is not a finished run" + ("" if prefix else " of --method all"))
        seed = result["seed"]
        results += [{"method": method, "seed": seed, "score": r["score"],
                     "low": round(r["ci"][0], 4), "high": round(r["ci"][1], 4), "turns": round(r["turns"], 3),
                     "seconds": round(r["seconds"], 1), "run_seconds": round(result["seconds"], 1),
                     "peak_rss_mb": round(result["peak_rss_mb"])} for method, r in result["methods"].items()]
        cards += [{"measure": measure, "speaker": speaker, "seed": seed, "value": value, "low": low,
                   "high": high}
                  for measure, row in result["report_card"].items()
                  for speaker, (value, low, high) in row.items()]
        curves += [{"seed": seed, **{k: row[k] for k in ("method", "step", "reward", "human_score", "turns",
                                                         "kl", "tokens")}}
                   for row in read_csv(run / "metrics.csv")]
    for name, rows in (("results", results), ("report_card", cards), ("curves", curves)):
        write_csv(ASSETS / f"{prefix}{name}.csv", rows)


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"plot.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Redraw assets/*curves.png.", allow_abbrev=False)
    parser.add_argument("--record", nargs="+", metavar="RUN", help="finished runs to write assets/*.csv from")
    parser.add_argument("--name", default="",
                        help="what the names of these files begin with (default: nothing)")
    parser.error = fail
    args = parser.parse_args()
    try:
        if args.record:
            record(args.record, args.name)
        for curves in ASSETS.glob("*curves.csv"):
            results = read_csv(curves.with_name(curves.name.replace("curves", "results")))
            base = [float(row["score"]) for row in results if row["method"] == "base"]
            rows = [row for row in read_csv(curves) if row["method"] in ("naive", "calibrated")]
            draw_curves(rows, curves.with_suffix(".png"), sum(base) / len(base))
    except (OSError, ValueError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
