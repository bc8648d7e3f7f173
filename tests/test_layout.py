"""The rules of the house: what may import what, how long things may be, how mistakes show."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train
from config import UserError

ROOT = Path(__file__).parent.parent
TOP, EXTRAS = sorted(ROOT.glob("*.py")), sorted(ROOT.glob("extras/*.py"))
NAMES = {path.stem if path in TOP else f"extras.{path.stem}": path for path in (*TOP, *EXTRAS)}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in NAMES.items()}
FIRST_EVENING = ("tasks task_math simulator logs sft align_sim report_card rollout grpo train config "
                 "shift_theory").split()
SECOND_EVENING = "model cache engine sampling logprobs chat".split()
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def imported(node):
    """Return the modules that an import statement names; none for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports(node, inside=()):
    """Yield (module, names of the functions around it) for every import below a node."""
    inside = (*inside, node.name) if isinstance(node, FUNCTION) else inside
    yield from ((module, inside) for module in imported(node))
    for child in ast.iter_child_nodes(node):
        yield from imports(child, inside)


def nodes(*kinds):
    """Yield (file, node) for every node of these kinds in our files."""
    for name, tree in TREES.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kinds))


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


# Who imports whom -------------------------------------------------------------------------------------------

def test_only_train_and_the_mains_of_the_others_know_the_extras():
    """The method reads, runs and imports without them."""
    found = [f"{path.name}: {module}" for path in TOP if path.name != "train.py"
             for module, inside in imports(TREES[path.stem])
             if module.split(".")[0] == "extras" and "main" not in inside]
    assert found == []


def test_imports_form_a_line():
    """Whoever reads the files in this order never meets a name that was not read before."""
    left = {name: {module for module, inside in imports(tree) if not inside and module in NAMES}
            for name, tree in TREES.items()}
    order = []
    while ready := [name for name in left if left[name] <= set(order)]:
        order += ready
        left = {name: needed for name, needed in left.items() if name not in ready}
    assert not left, f"in order: {', '.join(order)}; in a circle or behind one: {left}"


@pytest.mark.parametrize("module, may", [("config", {"config"}),
                                         ("shift_theory", {"config", "shift_theory"})])
def test_config_loads_no_file_of_ours_and_the_theory_only_config(module, may):
    absent = sorted({*NAMES, "torch"} - may)
    code = f"import sys, {module}; print(*(name for name in {absent} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# How long things may be -------------------------------------------------------------------------------------

def test_no_function_is_longer_than_60_lines():
    found = {f"{name}.{node.name}": node.end_lineno - node.lineno + 1 for name, node in nodes(*FUNCTION)}
    assert {name: length for name, length in found.items() if length > 60} == {}


def test_no_file_is_longer_than_350_lines_and_no_line_than_110_columns():
    ours = [*TOP, *EXTRAS]
    assert {path.name: len(lines(path)) for path in ours if len(lines(path)) > 350} == {}
    assert [f"{path.name}, line {i}" for path in [*ours, *ROOT.glob("tests/*.py")]
            for i, line in enumerate(lines(path), start=1) if len(line) > 110] == []


@pytest.mark.parametrize("files, most", [(FIRST_EVENING, 2200), (SECOND_EVENING, 1250)])
def test_an_evening_is_enough(files, most):
    total = sum(len(lines(NAMES[name])) for name in files)
    assert total <= most


def test_every_top_level_file_belongs_to_an_evening():
    assert sorted(path.stem for path in TOP) == sorted(FIRST_EVENING + SECOND_EVENING)


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 220 and len(text.split()) <= 2500


# How mistakes show ------------------------------------------------------------------------------------------

def test_only_config_ends_the_program():
    """One class for what a user did wrong, one place that says it."""
    assert [name for name, node in nodes(*FUNCTION) if node.name == "fail"] == []
    ends = [name for name, node in nodes(ast.Call, ast.Raise)
            if re.match(r"(sys\.exit|os\._exit|exit|quit)\(|raise SystemExit", ast.unparse(node))]
    assert set(ends) == {"config"}


def test_no_main_wraps_itself_in_a_try():
    """Mistakes of a user are `UserError`; what else is caught stands around the call that may raise it."""
    mains = [(name, node) for name, node in nodes(ast.FunctionDef) if node.name == "main"]
    wrapped = [name for name, main in mains for part in ast.walk(main) if isinstance(part, ast.Try)
               and part.body[-1].end_lineno - part.body[0].lineno + 1 > 5]
    assert len(mains) > 20 and wrapped == []
    last = [(name, statement) for name, tree in TREES.items() for statement in tree.body[-1:]]
    assert not [name for name, statement in last if isinstance(statement, ast.If)
                and any(isinstance(part, ast.Try) for part in ast.walk(statement))]


def test_nothing_that_was_read_is_run():
    """Files, servers and policies give data, which is never taken for Python."""
    called = [f"{name}: {ast.unparse(node)}" for name, node in nodes(ast.Call)
              if re.match(r"(builtins\.)?(eval|exec|compile|__import__)\(|torch\.load\(", ast.unparse(node))]
    trusted = [name for name, node in nodes(ast.keyword)
               if node.arg == "trust_remote_code" and ast.unparse(node.value) != "False"]
    pickled = [name for name, tree in TREES.items() for module, _ in imports(tree)
               if module.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")]
    assert called == trusted == pickled == []


@pytest.mark.parametrize("where", ("complete", "check_inputs", "load_data", "run", "print_table"))
@pytest.mark.parametrize("mistake", (ValueError, TypeError, KeyError, OSError))
def test_a_mistake_in_the_code_shows_its_traceback(tmp_path, monkeypatch, where, mistake):
    """Whoever changes a line and breaks it must see where."""
    def broken(*arguments, **options):
        raise mistake("a bug")

    if where == "print_table":                                  # after the run, which need not happen
        monkeypatch.setattr(train, "run", lambda *arguments: {"methods": {}, "report_card": {}})
        monkeypatch.setattr(train, "draw_curves", lambda *arguments: None)
    monkeypatch.setattr(train, where, broken)
    with pytest.raises(mistake, match="a bug"):
        train.main(["--out", str(tmp_path / "run"), "--train-problems", "9", "--card-dialogues", "3",
                    "--eval-problems", "3", "--test-problems", "3"])


def test_what_a_user_did_wrong_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise UserError("chats.jsonl, line 3: not JSON")

    monkeypatch.setattr(train, "load_data", refuse)
    with pytest.raises(SystemExit) as stop:
        train.main(["--out", str(tmp_path / "run")])
    assert stop.value.code == 2 and capsys.readouterr().err == "train.py: chats.jsonl, line 3: not JSON\n"
    assert not (tmp_path / "run").exists()
