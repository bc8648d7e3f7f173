"""The figures, each from a committed CSV.

    draw_curves       each method against its own user and against the human
    draw_shift        how the shift grows, as shift_theory.py computed it
    draw_data_flow    what becomes of what, and where in the code
    draw_dialogue     one dialogue, token by token, as the policy sampled it

Run `python -m extras.plot` to draw them all again.
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first: no screen is needed)
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402
from matplotlib.path import Path as Line  # noqa: E402
from PIL import Image  # noqa: E402

from config import METHODS, UserError  # noqa: E402

ORANGE, BLUE, GREY = "#c46a1b", "#2566a0", "#6b6b6b"                # the user's, the policy's, neither's
PALE_ORANGE, PALE_BLUE, PALE_GREY = "#fcf1e6", "#e9f1f8", "#f0f0f0"
SHADES = LinearSegmentedColormap.from_list("actions", ("#dcebf7", "#5d9bd0"))          # of log-probabilities


def read_csv(path: Path) -> list[dict]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def save(figure: plt.Figure, path: Path | str, dpi: int) -> None:
    """Write a PNG with a palette of its own, which makes it a third of the size."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def draw_curves(rows: list[dict], path: Path | str, base: float | None, score: str = "mean reward") -> None:
    """Draw a panel per method from rows with method, step, reward, human_score and perhaps seed.

    Where the two curves part, the policy has learned its simulator and not the task. A thin line is a seed, a
    thick one their mean; `base`, the untrained policy's score, is dashed.
    """
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    if not methods:
        return
    figure, panels = plt.subplots(1, len(methods), figsize=(1 + 3.6 * len(methods), 3.4), sharey=True,
                                  squeeze=False)
    for panel, method in zip(panels[0], methods):
        for column, colour, style, label in (("reward", ORANGE, ":", "its own user (training)"),
                                             ("human_score", BLUE, "-", "the human (validation)")):
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
    panels[0][0].set_ylabel(score)
    panels[0][-1].legend(fontsize=8, loc="lower right", framealpha=1)
    figure.tight_layout()
    save(figure, path, dpi=200)


def draw_shift(path: Path) -> None:
    """Draw shift_growth.csv, a panel per group of curves; dashes keep them apart without colour, too."""
    panels = {}
    for row in read_csv(path):
        panels.setdefault(row["panel"], {}).setdefault(row["curve"], []).append((float(row["x"]),
                                                                                 float(row["y"])))
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.6))
    for panel, (title, curves) in zip(axes.flat, panels.items()):
        shift, by_turn = title.endswith(("recovery", "shift")), next(iter(curves.values()))[0][0] == 0
        for (name, points), (dash, colour, width) in zip(curves.items(), (
                ("-", "0.7", 4.5), ("--", BLUE, 1.8), (":", ORANGE, 2.4), ("-.", "black", 1.4))):
            panel.plot(*zip(*points), dash, color=colour, linewidth=width, label=name)
        if not by_turn:                                        # by horizon: powers are straight lines
            (x0, y0), (x, _) = (points := next(iter(curves.values())))[0], points[-1]
            for slope in (1, 2):
                guide = [(v, 0.02 * y0 * (v / x0) ** slope) for v in (x0, (x0 * x) ** 0.5, x)]
                panel.plot(*zip(*guide), color="0.8", linewidth=1, zorder=0)
                panel.annotate(f" slope {slope}", guide[1], color=GREY, fontsize=8, va="top")
            panel.set(xscale="log", yscale="log")
        panel.set(title=title, xlabel="turn" if by_turn else "horizon H (turns)",
                  ylabel="shift $\\Delta_t$" if shift else "gap in return (R)")
        panel.legend(fontsize=8)
    figure.tight_layout()
    save(figure, path.with_suffix(".png"), dpi=150)


# Diagrams -------------------------------------------------------------------------------------------------

def canvas(width: float, height: float) -> tuple[plt.Figure, plt.Axes]:
    """Return an empty figure; its coordinates are pixels from the top left, as the README shows it."""
    figure = plt.figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def draw_data_flow(path: Path) -> None:
    """Draw boxes, texts and arrows; a box and a text have the code behind them, an arrow has a path."""
    colours = {"user": (ORANGE, PALE_ORANGE), "policy": (BLUE, PALE_BLUE), "plain": (GREY, "white")}
    figure, axes = canvas(900, 560)
    for row in read_csv(path):
        edge, face = colours[row["colour"]]
        x, y, width, height = (float(row[name] or 0) for name in ("x", "y", "width", "height"))
        if row["kind"] == "box":
            axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=6",
                                          edgecolor=edge, facecolor=face, linewidth=1.1))
            x, y = x + width / 2, y + height / 2
        elif row["kind"] == "arrow":
            points = [tuple(map(float, point.split())) for point in row["path"].split(";")]
            axes.add_patch(FancyArrowPatch(path=Line(points), arrowstyle="-|>,head_length=5,head_width=2.6",
                                           color=edge, linewidth=1.3, shrinkA=0, shrinkB=0))
        if row["code"]:
            axes.text(x, y - 8, row["text"], fontsize=9.5, weight="bold", ha="center", va="center")
            axes.text(x, y + 10, row["code"], family="monospace", fontsize=7.2, color=edge, ha="center",
                      va="center")
        else:
            axes.text(x, y, row["text"], fontsize=8, ha="center", va="center", linespacing=1.25,
                      color=edge if row["kind"] == "arrow" else "black")
    save(figure, path.with_suffix(".png"), dpi=200)


def messages(rows: list[dict]) -> list[tuple[str, list[dict]]]:
    """Group tokens by message; of the format's between two, those from the last "<" on open the second."""
    blocks, waiting = [], []
    for row in rows:
        if row["speaker"] == "format":
            waiting.append(row)
            continue
        if not blocks:
            blocks.append((row["speaker"], []))
        elif row["speaker"] != blocks[-1][0]:
            opening = max((i for i, r in enumerate(waiting) if r["text"].startswith("<")), default=0)
            blocks[-1][1].extend(waiting[:opening])
            blocks.append((row["speaker"], []))
            waiting = waiting[opening:]
        blocks[-1][1].extend([*waiting, row])
        waiting = []
    blocks[-1][1].extend(waiting)
    return blocks


def draw_dialogue(path: Path, columns: int = 88, least: float = -3.0) -> None:
    """Draw a dialogue's tokens as boxes of text, a block per message, its advantage beside it.

    Actions are blue, the darker the less likely they were, down to a log-probability of `least`; what the
    policy only reads is orange (the user's) or grey (the format's).
    """
    left, line, y, chips, marks = 92, 24, 58, [], []                                            # pixels
    blocks = messages(read_csv(path))
    for row in (row for _, rows in blocks for row in rows):                     # signs for newline and space
        row["text"] = row["text"].replace("\n", "\u21b5").strip() or "\u2423"
    widest = min(columns, max(sum(len(row["text"]) + 1 for row in rows) for _, rows in blocks))
    cell = min(9.0, 716 / widest)
    for speaker, rows in blocks:
        marks.append((speaker, y, next((row["advantage"] for row in rows if row["advantage"]), "")))
        x = 0
        for row in rows:
            width = len(row["text"]) + 1
            if x and x + width > columns:
                x, y = 0, y + line
            chips.append((left + cell * x, y, cell * width, row))
            x += width
        y += line + 8
    figure, axes = canvas(900, y + 6)
    for x, y, width, row in chips:
        face = PALE_ORANGE if row["speaker"] == "user" else PALE_GREY
        if row["action"] == "1":
            face = SHADES(min(1.0, float(row["logprob"]) / least))
        axes.add_patch(Rectangle((x, y), width, line - 3, facecolor=face, edgecolor="white", linewidth=1.4))
        axes.text(x + width / 2, y + 10.5, row["text"], family="monospace", fontsize=1.15 * cell, ha="center",
                  va="center_baseline", parse_math=False,
                  color=GREY if row["speaker"] == "format" else "black")
    for speaker, y, advantage in marks:
        axes.text(left - 10, y + 10.5, speaker, fontsize=9, ha="right", va="center_baseline",
                  color=ORANGE if speaker == "user" else BLUE)
        axes.text(884, y + 10.5, f"{float(advantage):+.2f}" if advantage else "", fontsize=9.5, ha="right",
                  va="center_baseline", color=BLUE, weight="bold")
    draw_legend(axes, left, least)
    save(figure, path.with_suffix(".png"), dpi=200)


def draw_legend(axes: plt.Axes, x: float, least: float) -> None:
    """Say above a dialogue what its colours mean."""
    style = {"fontsize": 8.5, "va": "center_baseline"}
    for face, text, width in ((PALE_ORANGE, "the user's tokens", 140), (PALE_GREY, "the format's", 117)):
        axes.add_patch(Rectangle((x, 16), 18, 14, facecolor=face, edgecolor="0.8", linewidth=0.6))
        axes.text(x + 24, 23, text, **style)
        x += width
    axes.text(x + 222, 23, "actions, with log-probability 0", ha="right", **style)
    axes.imshow([[i / 50 for i in range(51)]], cmap=SHADES, extent=(x + 228, x + 318, 30, 16), aspect="auto")
    axes.text(x + 324, 23, f"{least:g} or less", **style)
    axes.text(884, 23, "advantage", ha="right", color=BLUE, **style)
