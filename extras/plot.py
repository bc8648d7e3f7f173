"""The table, and the figures again.

Run `python -m extras.plot` to draw every figure in assets/ from the CSV beside it. `python -m extras.plot
--record RUN RUN ...` first collects finished runs in assets/math_results.csv, math_report_card.csv and
math_curves.csv; `--name smollm2_` keeps other runs beside them.
"""

import csv
import json
from pathlib import Path

from config import METHODS, Parser, UserError, command
from extras.figures import draw_curves, draw_data_flow, draw_dialogue, draw_shift, read_csv
from tasks import find_task, task_names

ASSETS = Path(__file__).parent.parent / "assets"


def print_table(results: dict[str, dict], paper: dict[str, float], recorded: str, score: str) -> None:
    """Print a run's scores beside the paper's; `score` says what they are.

    Methods that the run left out have the recorded scores of the task named `recorded`, if there are any.
    """
    scores, path = {}, ASSETS / f"{recorded}_results.csv"
    for row in read_csv(path) if recorded and path.exists() else []:
        scores.setdefault(row["method"], []).append(float(row["score"]))
    layout = "{:12s}{:>20s}{:>18s}{:>8s}{:>10s}{:>14s}"
    print()
    print(layout.format("method", "against the human", "95 % interval", "turns", "seconds", "the paper"))
    for method in dict.fromkeys([*METHODS, *results]):
        published = f"{paper[method]:.1f}" if method in paper else "-"
        if method in results:
            r = results[method]
            interval = f"[{100 * r['ci'][0]:.1f}, {100 * r['ci'][1]:.1f}]"
            print(layout.format(method, f"{100 * r['score']:.1f}", interval, f"{r['turns']:.2f}",
                                f"{r['seconds']:.0f}", published))
        elif method in scores:
            mean = sum(scores[method]) / len(scores[method])
            print(layout.format(method, f"{100 * mean:.1f} (recorded)", "-", "-", "-", published))
    print(f"In per cent: {score}" + (", a tiny model with a scripted human" if scores else "")
          + "; the paper's: Gemma-3-4B-IT.")


def read_run(run: Path, prefix: str) -> tuple[list[dict], list[dict], list[dict]]:
    """Return the rows of a finished run: results, report card and curves.

    Raises: UserError if it is not finished or, under its task's own name, has not trained every method.
    """
    path = run / "result.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    result = result if isinstance(result, dict) else {}
    methods = result.get("methods")
    missing = set(METHODS) - set(methods if isinstance(methods, dict) else ())
    everything = prefix == f"{result.get('task')}_"
    if missing and everything or len(missing) == len(METHODS):
        raise UserError(f"{run} is not a finished run" + (" of --method all" if everything else ""))
    try:
        seed = result["seed"]
        results = [{"method": method, "seed": seed, "score": r["score"],
                    "low": round(r["ci"][0], 4), "high": round(r["ci"][1], 4), "turns": round(r["turns"], 3),
                    "seconds": round(r["seconds"], 1), "run_seconds": round(result["seconds"], 1),
                    "peak_rss_mb": round(result["peak_rss_mb"])} for method, r in result["methods"].items()]
        card = [{"measure": measure, "speaker": speaker, "seed": seed, "value": value, "low": low,
                 "high": high}
                for measure, row in result["report_card"].items()
                for speaker, (value, low, high) in row.items()]
        curves = [{"seed": seed, **{k: row[k] for k in ("method", "step", "reward", "human_score", "turns",
                                                        "kl", "tokens")}}
                  for row in read_csv(run / "metrics.csv")]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not what a finished run writes: {error!r}") from None
    return results, card, curves


def record(runs: list[str], prefix: str) -> None:
    """Collect the figures of finished runs into the committed CSV files."""
    tables = [read_run(Path(run), prefix) for run in runs]
    for name, parts in zip(("results", "report_card", "curves"), zip(*tables)):
        write_csv(ASSETS / f"{prefix}{name}.csv", [row for part in parts for row in part])


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write rows that have the same columns; without rows there is nothing to write."""
    if not rows:
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def redraw() -> None:
    """Draw every figure whose CSV is there."""
    for path in sorted(ASSETS.glob("*curves.csv")):
        results = read_csv(path.with_name(path.name.replace("curves", "results")))
        base = [float(row["score"]) for row in results if row["method"] == "base"]
        rows = [row for row in read_csv(path) if row["method"] in ("naive", "calibrated")]
        score = next((find_task(name).score for name in task_names() if path.name == f"{name}_curves.csv"),
                     "mean reward")
        draw_curves(rows, path.with_suffix(".png"), sum(base) / len(base) if base else None, score)
    draw_shift(ASSETS / "shift_growth.csv")
    draw_data_flow(ASSETS / "data_flow.csv")
    for path in sorted(ASSETS.glob("*dialogue.csv")):
        draw_dialogue(path)


@command
def main() -> None:
    parser = Parser("Draw the figures in assets/ again.")
    parser.add_argument("--record", nargs="+", metavar="RUN", help="finished runs to write assets/*.csv from")
    parser.add_argument("--name", default="math_",
                        help="what the names of these files begin with (default: math_)")
    args = parser.parse_args()
    if args.record:
        record(args.record, args.name)
    redraw()


if __name__ == "__main__":
    main()
