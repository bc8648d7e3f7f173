"""Figures and table: drawn again from committed CSV, and what they show."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from config import METHODS, UserError
from extras import figures, plot
from extras.figures import draw_curves, draw_data_flow, draw_dialogue, messages

ASSETS = Path(__file__).parent.parent / "assets"
COMMITTED = sorted(path.name for path in ASSETS.glob("*.png"))
DIALOGUE = [("format", "<|user|>", "", ""), ("user", " it costs", "", ""), ("user", " $5 and $7", "", ""),
            ("format", "<|end|>", "", ""), ("format", "<|assistant|>", "", ""),
            ("assistant", "How\nmany?", "-0.10", "+1.25"), ("assistant", "", "-9.00", "+1.25"),
            ("assistant", "<|end|>", "0.00", "+1.25"), ("format", "<|user|>", "", ""),
            ("user", "thanks", "", "")]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, to look at what is in them."""
    found, save = [], figures.save
    monkeypatch.setattr(figures, "save", lambda figure, *args, **options: (
        found.append(figure), save(figure, *args, **options)))
    return found


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def dialogue_rows():
    return [{"turn": 0, "speaker": speaker, "token": 1, "text": text, "action": int(logprob != ""),
             "logprob": logprob, "advantage": advantage} for speaker, text, logprob, advantage in DIALOGUE]


# Figures ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_figure_is_small(name):
    assert (ASSETS / name).stat().st_size < 150_000


def test_one_command_draws_every_committed_figure_again_from_its_csv(tmp_path, monkeypatch):
    """The same names and sizes; another version of matplotlib may draw other pixels."""
    for path in ASSETS.glob("*.csv"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(plot, "ASSETS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py"])
    plot.main()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == COMMITTED
    for name in COMMITTED:
        with Image.open(tmp_path / name) as ours, Image.open(ASSETS / name) as committed:
            assert ours.size == committed.size, name
        assert (tmp_path / name).stat().st_size < 150_000


def test_the_data_flow_names_every_text_and_function_of_its_csv(tmp_path, drawn):
    shutil.copy(ASSETS / "data_flow.csv", tmp_path)
    draw_data_flow(tmp_path / "data_flow.csv")
    shown = {text.get_text() for text in drawn[0].axes[0].texts}
    with open(ASSETS / "data_flow.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert {row["text"], row["code"]} - {""} <= shown


def test_curves_are_a_thin_line_per_seed_a_thick_mean_and_the_untrained_policy_dashed(tmp_path, drawn):
    """Two seeds, steps 1 and 2; the human scored step 2 alone, 0.4 and 0.6 by seed: the mean is 0.5."""
    rows = [{"method": "calibrated", "seed": str(seed), "step": str(step),
             "reward": str(0.2 * seed + 0.1 * step),
             "human_score": str(0.4 + 0.2 * seed) if step == 2 else ""}
            for seed in (0, 1) for step in (1, 2)]
    draw_curves(rows, tmp_path / "curves.png", 0.25, "share of problems solved")
    panel, = drawn[0].axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
    expected = [([1, 2], [0.1, 0.2]), ([1, 2], [0.3, 0.4]), ([1, 2], [0.2, 0.3]),             # its own user
                ([2], [0.4]), ([2], [0.6]), ([2], [0.5]), ([0, 1], [0.25, 0.25])]            # the human, base
    for (x, y), (their_x, their_y) in zip(lines, expected, strict=True):
        assert x == their_x and y == pytest.approx(their_y)
    widths = [line.get_linewidth() for line in panel.lines]
    assert max(widths[0], widths[1], widths[3], widths[4]) < min(widths[2], widths[5])
    assert panel.lines[-1].get_linestyle() == "--"
    assert panel.get_ylabel() == "share of problems solved" and "step" in panel.get_xlabel()
    assert panel.get_title() == "calibrated" and (tmp_path / "curves.png").stat().st_size < 150_000


def test_a_dialogues_tokens_are_grouped_by_message():
    """The end-of-turn of the format closes a message, and its <|user|> or <|assistant|> opens the next."""
    blocks = [(speaker, [row["text"] for row in rows]) for speaker, rows in messages(dialogue_rows())]
    assert blocks == [("user", ["<|user|>", " it costs", " $5 and $7", "<|end|>"]),
                      ("assistant", ["<|assistant|>", "How\nmany?", "", "<|end|>"]),
                      ("user", ["<|user|>", "thanks"])]


def test_a_dialogue_shows_every_token_as_it_is(tmp_path, drawn):
    """Dollars are no maths, control tokens are text, a newline and an empty text have signs of their own; an
    action is the darker the less likely it was.
    """
    path = write(tmp_path / "dialogue.csv", dialogue_rows())
    draw_dialogue(path)
    shown = [text.get_text() for text in drawn[0].axes[0].texts]
    assert shown[:len(DIALOGUE)] == ["<|user|>", "it costs", "$5 and $7", "<|end|>", "<|assistant|>",
                                     "How↵many?", "␣", "<|end|>", "<|user|>", "thanks"]
    assert not any(text.get_parse_math() for text in drawn[0].axes[0].texts[:len(DIALOGUE)])
    assert shown.count("+1.25") == 1                         # the advantage stands beside the message once
    assert 0 < path.with_suffix(".png").stat().st_size < 150_000
    faces = [sum(patch.get_facecolor()[:3]) for patch in drawn[0].axes[0].patches]
    likely, unlikely, certain = faces[5:8]                   # log-probabilities -0.1, -9 and 0
    assert unlikely < likely < certain


# The table --------------------------------------------------------------------------------------------------

RESULTS = {"base": {"score": 0.205, "ci": [0.181, 0.231], "turns": 2.5, "seconds": 12.4},
           "calibrated": {"score": 0.7, "ci": [0.6, 0.8], "turns": 3.125, "seconds": 100.0}}


def test_the_table_has_a_line_per_method_and_the_papers_score_beside_ours(capsys):
    plot.print_table(RESULTS, {"base": 82.3}, "", "share of problems solved")
    assert capsys.readouterr().out == """
method         against the human     95 % interval   turns   seconds     the paper
base                        20.5      [18.1, 23.1]    2.50        12          82.3
calibrated                  70.0      [60.0, 80.0]    3.12       100             -
In per cent: share of problems solved; the paper's: Gemma-3-4B-IT.
"""


def test_methods_that_a_run_left_out_have_their_recorded_scores(tmp_path, monkeypatch, capsys):
    """Two seeds were recorded, 0.4 and 0.5; the run's own score counts, not the recorded one."""
    monkeypatch.setattr(plot, "ASSETS", tmp_path)
    write(tmp_path / "math_results.csv",
          [{"method": method, "seed": seed, "score": score} for method, seed, score in
           (("naive", 0, 0.4), ("naive", 1, 0.5), ("calibrated", 0, 0.1))])
    plot.print_table({"calibrated": RESULTS["calibrated"]}, {"naive": 89.3}, "math", "mean reward")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["naive", "45.0", "(recorded)", "-", "-", "-", "89.3"]
    assert lines[3].split()[:2] == ["calibrated", "70.0"]
    assert lines[4].startswith("In per cent: mean reward, a tiny model with a scripted human;")


# Recording --------------------------------------------------------------------------------------------------

def finished(folder, methods=METHODS):
    """Write what a run of these methods leaves behind, in short."""
    folder.mkdir()
    result = {"task": "math", "seed": 3, "seconds": 99.96, "peak_rss_mb": 512.4,
              "methods": {method: RESULTS["base"] for method in methods},
              "report_card": {"facts stated right": {"human": [0.9, 0.8, 1.0]}}}
    (folder / "result.json").write_text(json.dumps(result))
    write(folder / "metrics.csv", [{"method": "naive", "step": 1, "reward": 0.5, "human_score": "",
                                    "turns": 3, "kl": 0.01, "tokens": 700, "seconds": 1.5}])
    return folder


def test_a_finished_run_is_recorded_in_three_files(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "ASSETS", tmp_path)
    plot.record([str(finished(tmp_path / "run"))], "math_")
    found = {name: (tmp_path / f"math_{name}.csv").read_text().splitlines()
             for name in ("results", "report_card", "curves")}
    assert found["results"][:2] == ["method,seed,score,low,high,turns,seconds,run_seconds,peak_rss_mb",
                                    "base,3,0.205,0.181,0.231,2.5,12.4,100.0,512"]
    assert len(found["results"]) == 1 + len(METHODS)
    assert found["report_card"] == ["measure,speaker,seed,value,low,high",
                                    "facts stated right,human,3,0.9,0.8,1.0"]
    assert found["curves"] == ["seed,method,step,reward,human_score,turns,kl,tokens",
                               "3,naive,1,0.5,,3,0.01,700"]


@pytest.mark.parametrize("content, message", (
    (None, "cannot be read"), ("{", "cannot be read"), ("[]", "is not a finished run"),
    ("{}", "is not a finished run"), ('{"methods": {}}', "is not a finished run"),
    ('{"task": "math", "methods": {"base": {}}}', "is not a finished run of --method all"),
    (json.dumps({"task": "guess", "methods": {"base": {}}}), "is not what a finished run writes")))
def test_an_unfinished_run_is_refused_by_name_in_one_line(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(plot, "ASSETS", tmp_path / "assets")
    run = tmp_path / "run"
    run.mkdir()
    if content is not None:
        (run / "result.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        plot.record([str(finished(tmp_path / "good")), str(run)], "math_")
    assert str(run) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "assets").exists()                               # nothing is written of the others


def test_the_script_says_in_one_line_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot.py", "--record", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        plot.main()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("plot.py: ") and error.count("\n") == 1
