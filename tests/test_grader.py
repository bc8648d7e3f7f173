"""Algebra by math-verify in a worker process: what is equal, what is refused, what happens when it hangs."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from config import UserError
from extras import grader
from extras.grader import equal, same_by_algebra, too_costly, with_algebra, worker
from task_math import TASK
from tasks import GradingError

ROOT = Path(__file__).parent.parent
WORKER = [sys.executable, "-m", "extras.grader"]
HANGS = r"\binom{99999999}{44444444}"               # passes the guard: thirty million digits


@pytest.mark.parametrize("gold, given", [
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", r"\frac12"), (r"\frac{1}{2}", "2/4"), ("1000", "1{,}000"),
    (r"2\sqrt{3}", r"\sqrt{12}"), ("x^2+2x+1", "(x+1)^2"), (r"\{1,2\}", "2, 1"), (r"-\pi", "\u2212\\pi"),
    (r"\text{Eve}", r"\text{Eve}"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"), ("5", r"5\text{ cm}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "\\begin{pmatrix}1\\\\\n2\\end{pmatrix}"), ("10", r"\$10")])
def test_an_answer_is_the_same_however_it_is_written(gold, given):
    assert same_by_algebra(gold, given)


@pytest.mark.parametrize("gold, given", [
    (r"\frac{1}{2}", r"\frac{1}{3}"), (r"\frac13", "0.33"), ("(1,2)", "(2,1)"), ("10", "10, 11"),
    ("10", "10 or 11"), (r"\text{even}", r"\text{odd}"), ("x", ""), ("x", "{"), ("x", "}"), ("x", "\ud800"),
    ("x", "\0"), ("x", r"y} \boxed{x"), ("x", '"]\n["'), ("x", "__import__('os')")])
def test_another_answer_is_not(gold, given):
    assert not same_by_algebra(gold, given)


def test_plain_numbers_are_compared_without_algebra_and_all_else_with_it(monkeypatch):
    """A task compares letter by letter until it is given algebra."""
    asked = []
    monkeypatch.setattr(grader, "same_by_algebra", lambda *answers: asked.append(answers) or True)
    assert with_algebra(TASK).equal is equal and not TASK.equal("10", "10.0")
    assert equal("2,950", "$2950.00 dollars") and equal("-3", "\u22123") and not equal("10", "11")
    assert not equal("10", "7 + 3") and not asked
    assert equal("2x", "2") and equal("1000.50", r"\frac{2001}{2}") and equal("1/2", "0.5")
    assert asked == [("2x", "2"), ("1000.50", r"\frac{2001}{2}"), ("1/2", "0.5")]


def test_math_verify_takes_5_for_x_equals_5_and_50_for_50_percent():
    assert same_by_algebra("x=5", "5") and same_by_algebra("5", "x=5")
    assert same_by_algebra(r"50\%", "50") and same_by_algebra("50", r"50\%")


@pytest.mark.parametrize("answer", (
    "9^{9^{9}}", "10^{10^{10}}", "9^9^9", "9**9**9", "9 ^ {9 ^ 9}", r"9^{\left(9^{9}\right)}",
    "9^{(3+6)^{9}}", r"\frac{9^{99999999}}{2}", "9^{2+99999999}", "9^{-99999999}", "(9^{9999})^{9999}",
    "99999999!", "(99999)!", "9!!!", "(9!)!", "9^{9!}", "9" * 201, "9" * 3_000_000, r"\frac{1",
    "{" * 150, "(" * 90 + "1" + ")" * 90, r"\frac{" * 25 + "1" + "}{2}" * 25))
def test_a_hostile_answer_is_refused_and_no_algebra_is_done(answer, monkeypatch):
    monkeypatch.setattr(grader, "worker", None)
    assert too_costly(answer)
    assert not same_by_algebra("1", answer)


@pytest.mark.parametrize("answer", (
    "999!", r"\frac{10!}{3!\,7!}", "(n+1)!", "2^{1006}", "3^{2n+1}", "x^{2^{k}}", "e^{-x^2/2}", "x^2y^2",
    r"\frac{x^2}{y^2}", "x^{10}12345", "(x^2+1)^2", "[0, 1)", r"\left(-\infty, 3\right]", "123456789",
    r"3.5 \times 10^{12}", r"\left\{ \frac{1}{2}, \sqrt{2} \right\}", "P^{2}",
    r"\frac{-1 \pm \sqrt{1+\sqrt{1+\sqrt{5}}}}{2}"))
def test_an_honest_answer_is_not_too_costly(answer):
    assert not too_costly(answer)


def test_a_check_that_overruns_is_an_error_and_the_next_one_gets_a_new_worker():
    same_by_algebra("1", "2/2")
    first = worker()
    with pytest.raises(GradingError, match="took over 2 seconds") as error:
        same_by_algebra("1", HANGS)
    assert "\n" not in str(error.value) and first.returncode is not None
    assert same_by_algebra("1", "2/2") and worker() is not first


def test_a_dead_worker_is_an_error_once():
    same_by_algebra("1", "2/2")
    worker().kill()
    worker().wait()
    with pytest.raises(GradingError, match="the worker died"):
        same_by_algebra("1", "2/2")
    assert same_by_algebra("1", "2/2")


def test_an_interrupted_check_leaves_no_verdict_for_the_next_one_to_read():
    """Ctrl-C while it waits, here an alarm: the pipe would be one verdict behind from then on."""
    def interrupt(*_):
        raise KeyboardInterrupt

    same_by_algebra("1", "2/2")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        same_by_algebra("1", HANGS)
    signal.signal(signal.SIGALRM, before)
    assert same_by_algebra("1", "2/2") and not same_by_algebra("1", "2/3")


def test_a_missing_math_verify_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match="pip install math-verify"):
        worker.__wrapped__()


def test_checks_from_several_threads_get_their_own_verdicts():
    """math-verify's own timeouts raise off the main thread; and one pipe must not mix up the answers."""
    verdicts = {}

    def check(i):
        verdicts[i] = [same_by_algebra(str(i), f"{2 * n}/2") for n in range(8)]

    threads = [threading.Thread(target=check, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {i: [n == i for n in range(8)] for i in range(8)}


def test_the_worker_prints_a_verdict_a_line_and_ends_with_its_input():
    """So it cannot outlive the process that holds the other end of its pipe, however that ended."""
    lines = '["1/2", "0.5"]\n["1/2", "0.6"]\n'
    done = subprocess.run(WORKER, cwd=ROOT, input=lines, capture_output=True, text=True, timeout=60)
    assert done.stdout == "true\nfalse\n" and done.returncode == 0


def test_the_worker_ends_a_check_that_overruns_by_itself():
    """Nobody is left to kill it if the process that asked has gone meanwhile."""
    done = subprocess.run(WORKER, cwd=ROOT, input=json.dumps(["1", "9^{9^{9}}"]), capture_output=True,
                          text=True, timeout=60)
    assert done.stdout == "" and done.returncode != 0


def test_a_program_that_grades_prints_nothing_of_it(tmp_path):
    """Not from a script without a main guard either, which a spawned process would run again."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                      "from extras.grader import same_by_algebra\n"
                      "print(same_by_algebra('1', '2/2'), same_by_algebra('x', '|'))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("True False\n", "", 0)


def test_the_worker_does_not_load_torch():
    """It would take seconds and a gigabyte to start."""
    code = "import sys, extras.grader, math_verify; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
