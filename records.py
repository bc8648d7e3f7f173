"""What a run writes: a line a step on the screen and in metrics.csv, losses, transcripts, JSON.

Run `python records.py RUN` to read the transcripts of a run's last evaluation.
"""

import csv
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from logs import print_messages
from plot import read_csv
from rollout import Trajectory

METRICS = ("method", "step", "reward", "human_score", "turns", "kl", "ratio_max", "clip_frac",
           "frac_zero_std", "grad_norm", "tokens", "seconds", "truncated", "failed")
LOG_LINE = ("{method:10s} {step:4d}/{steps}  reward {reward:.3f}  human {score}  turns {turns:.2f}  "
            "kl {kl:6.3f}  ratio {ratio_max:5.2f}  clip {clip_frac:.3f}  same {frac_zero_std:.2f}  "
            "grad {grad_norm:5.2f}  tokens {tokens:6d}  {seconds:5.2f} s")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def print_row(row: dict, steps: int) -> None:
    score = "  -  " if row["human_score"] is None else f"{row['human_score']:.3f}"
    tqdm.write(LOG_LINE.format(**row, steps=steps, score=score))


def write_json(path: Path, value) -> None:
    """Write a file that is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def append_csv(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    new = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows({name: f"{v:.5g}" if isinstance(v, float) else v for name, v in row.items()}
                         for row in rows)


def log_losses(out: Path, phase: str, losses: list[float]) -> None:
    append_csv(out / "sft.csv", ("phase", "step", "loss"),
               [{"phase": phase, "step": i, "loss": loss} for i, loss in enumerate(losses, start=1)])
    tqdm.write(f"{phase:12s} loss {losses[0]:.3f} -> {mean(losses[-20:]):.3f} in {len(losses)} steps")


def read_rows(path: Path) -> list[dict]:
    return read_csv(path) if path.exists() else []


def forget_after(path: Path, method: str, step: int) -> None:
    """Drop the rows of a method that a resumed run will write again."""
    rows = read_rows(path)
    stay = [row for row in rows if row["method"] != method or int(row["step"]) <= step]
    if len(stay) < len(rows):
        path.unlink()
        append_csv(path, METRICS, stay)


def append_samples(path: Path, method: str, step: int, trajectories: list[Trajectory]) -> None:
    """Append dialogues to a JSONL file, a line each; failed ones are left out."""
    with open(path, "a", encoding="utf-8") as file:
        for t in (t for t in trajectories if t.ended != "failed"):
            sample = {"method": method, "step": step, "problem": t.problem.question, "messages": t.messages,
                      "reward": t.reward, "ended": t.ended}
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")


def main() -> None:
    """Print the transcripts that a run wrote last."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "samples.jsonl").is_file():
        print("records.py: give the folder of a run", file=sys.stderr)
        sys.exit(2)
    lines = (Path(sys.argv[1]) / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    for sample in map(json.loads, lines[-5:]):
        print(f"\n[{sample['problem']}]  {sample['method']}, step {sample['step']}")
        print_messages(sample["messages"])
        print(f"{'':9}  ended: {sample['ended']}, reward {sample['reward']:.0f}")


if __name__ == "__main__":
    main()
