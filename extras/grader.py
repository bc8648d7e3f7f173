"""Whether an answer is the right one, however it is written.

Plain numbers are compared here. All else goes to math-verify, which knows that `\\frac{1}{2}` is `0.5`, in a
worker process.

Algebra on what a policy writes may never end, as `9^{9^{9}}` does not, and math-verify's own timeouts work in
the main thread only. So

1. `too_costly` refuses answers that are too long or grow too large: they are wrong, and no algebra is done;
2. all else goes to one worker, one line of JSON per check: nothing is pickled or evaluated as Python;
3. a watchdog ends the worker at the deadline, and the next check starts another. Nobody knows then whether
   the answer was right, which is a `GradingError` and not a reward of 0.

This file is also the worker: `echo '["0.5", "1/2"]' | python -m extras.grader` prints true.
"""

import faulthandler
import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from config import UserError
from tasks import GradingError, Task

LONGEST, DEEPEST = 200, 10      # characters and nested brackets of an answer
DEADLINE = 2.0                  # seconds a check may take
LOCK = threading.Lock()         # the worker answers one check after the other

GROUP = re.compile(r"[{(\[]([^{}()\[\]]*)[})\]]")                                     # with no group inside
POWER = re.compile(r"\d ?\^[-+]?\d|[!P]")                                             # of a number
HUGE = re.compile(r"\^[-+]?(\d{5,}|\d+ ?[\^!]|P)|P ?\^\d{3,}|(\d{4,} ?|[!P])!")


def too_costly(answer: str) -> bool:
    """Whether an answer is too long, has braces left open or a power or factorial too large to compute.

    Brackets are taken off from the innermost: P stands for what held a power, else the longest number stays.
    """
    def content(group: re.Match) -> str:
        longest = max(re.findall(r"\d+", group[1]), key=len, default="")
        return "P" if POWER.search(group[1]) else f"{longest} "

    if len(answer) > LONGEST:
        return True
    flat = re.sub(r"\s|P|\\left|\\right", "", answer.replace("**", "^"))
    for _ in range(DEEPEST):
        if HUGE.search(flat):
            return True
        flat = GROUP.sub(content, flat)
    return bool(HUGE.search(flat) or re.search(r"[{}()]", flat))


@lru_cache(maxsize=1)
def worker() -> subprocess.Popen:
    """Start the worker, or return the one that runs; it ends with this process, whose end closes its input.

    Raises: UserError if math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise UserError("answers that are no plain numbers need math-verify: pip install math-verify")
    return subprocess.Popen([sys.executable, "-m", "extras.grader"], cwd=Path(__file__).parent.parent,
                            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL,
                            start_new_session=True)                  # Ctrl-C is for the main process alone


def same_by_algebra(gold: str, given: str) -> bool:
    """Return whether math-verify takes an answer for the right one.

    Raises: GradingError if it comes to no verdict before the deadline.
    """
    if too_costly(gold) or too_costly(given):
        return False
    with LOCK:
        process, verdict = worker(), b""
        try:
            process.stdin.write(json.dumps([gold, given]).encode() + b"\n")
            verdict = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not verdict:                    # after an interrupt too: the next check must not read this one
                worker.cache_clear()
                process.kill()
                process.communicate()
    if not verdict:
        raise GradingError(f"whether {given!r:.50} is {gold!r:.50} took over {DEADLINE:.0f} seconds, or the "
                           "worker died")
    return verdict == b"true\n"


def plain_number(text: str) -> Decimal | None:
    """Read a plain number; `$`, thousands commas, a final full stop, `%` and unit words do not matter."""
    match = re.fullmatch(r"\$?\s*([-\u2212]?)\s*\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\s*(?:%|[A-Za-z ]*)\s*\.?",
                         text.strip()[:100])
    return Decimal(("-" if match[1] else "") + match[2].replace(",", "")
                   + (match[3] or "")) if match else None


def gold_number(answer: str) -> Decimal | None:
    """Read a right answer that is a plain number: letters right behind it are no unit, as in 2x or 3i."""
    return None if re.search(r"\d[A-Za-z]|\d [A-Za-z]\b", answer) else plain_number(answer)


def equal(gold: str, given: str) -> bool:
    """Return whether a given answer is the right one.

    Raises: GradingError if math-verify is needed and comes to no verdict.
    """
    number, value = gold_number(gold), plain_number(given)
    if number is None:
        return same_by_algebra(gold, given)
    if value is None and re.search(r"[\\/{]", given):                            # 20/2, \frac{20}{2}, 1{,}000
        return same_by_algebra(f"{number:f}", given)
    return value == number


def with_algebra(task: Task) -> Task:
    """Return a task whose answers are compared as numbers and by math-verify, unless it does so itself."""
    return replace(task, equal=equal) if task.equal is Task.equal else task


def main() -> None:
    """Answer every line `["gold", "given"]` with true or false, until the input ends."""
    from math_verify import LatexExtractionConfig, parse, verify

    verdicts, sys.stdout = sys.stdout, sys.stderr                    # what a library prints is no verdict
    for line in sys.stdin:
        faulthandler.dump_traceback_later(DEADLINE, exit=True)       # interrupts even one long multiplication
        gold, given = (parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], fallback_mode="no_fallback",
                             parsing_timeout=None) for answer in json.loads(line))
        verdict = verify(gold, given, timeout_seconds=None)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(verdict), file=verdicts, flush=True)


if __name__ == "__main__":
    main()
