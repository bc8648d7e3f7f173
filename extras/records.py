"""What a run writes: a line per step on the screen and in metrics.csv, losses, transcripts, JSON.

Run `python -m extras.records RUN` to read the transcripts of a run's last evaluation.
"""

import csv
import json
import math
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from config import Config, Parser, UserError, command
from extras.figures import read_csv
from logs import print_messages
from rollout import Trajectory

METRICS = ("method", "step", "reward", "human_score", "turns", "kl", "ratio_max", "clip_frac",
           "frac_zero_std", "grad_norm", "tokens", "seconds", "truncated", "failed")
LOG_LINE = ("{method:10s} {step:4d}/{steps}  reward {reward:.3f}  human {score}  turns {turns:.2f}  "
            "kl {kl:6.3f}  ratio {ratio_max:5.2f}  clip {clip_frac:.3f}  same {frac_zero_std:.2f}  "
            "grad {grad_norm:5.2f}  tokens {tokens:6d}  {seconds:5.2f} s")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def interval(rewards: list[float]) -> list[float]:
    """Return the 95 % interval of a mean reward between 0 and 1.

    Of rewards that are all 0 or 1 it is Wilson's (1927), which is fair near both ends; of others it is the
    mean +- 1.96 standard errors.
    """
    n, p, z = len(rewards), sum(rewards) / len(rewards), 1.96
    if set(rewards) <= {0.0, 1.0}:
        centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    else:
        spread = z * math.sqrt(sum((r - p) ** 2 for r in rewards) / max(1, n - 1) / n)
        low, high = p - spread, p + spread
    return [max(0.0, low), min(1.0, high)]


def peak_rss_mb() -> float:
    """Return the largest memory that this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def print_row(row: dict, steps: int) -> None:
    score = "  -  " if row["human_score"] is None else f"{row['human_score']:.3f}"
    tqdm.write(LOG_LINE.format(**row, steps=steps, score=score))


def write_json(path: Path, value) -> None:
    """Write a file that is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def begin_folder(config: Config) -> None:
    """Make the folder of a run and write its configuration there."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", asdict(config))
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}") from None


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
    """Append dialogues to a JSONL file, one per line; failed ones are left out."""
    with open(path, "a", encoding="utf-8") as file:
        for t in (t for t in trajectories if t.ended != "failed"):
            sample = {"method": method, "step": step, "problem": t.problem.goal, "messages": t.messages,
                      "reward": t.reward, "ended": t.ended}
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")


@command
def main() -> None:
    """Print the transcripts that a run wrote last."""
    parser = Parser("Read the transcripts of a run's last evaluation.")
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    path = Path(parser.parse_args().run) / "samples.jsonl"
    if not path.is_file():
        raise UserError(f"give the folder of a run: there is no {path}")
    for sample in map(json.loads, path.read_text(encoding="utf-8").splitlines()[-5:]):
        print(f"\n[{sample['problem']}]  {sample['method']}, step {sample['step']}")
        print_messages(sample["messages"])
        print(f"{'':9}  ended: {sample['ended']}, reward {sample['reward']:.3g}")


if __name__ == "__main__":
    main()
