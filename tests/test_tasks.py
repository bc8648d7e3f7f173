"""Problems, splits and sentences."""

import subprocess
import sys
from pathlib import Path

import pytest

from config import UserError
from extras.grader import with_algebra
from extras.readers import read_problems
from task_math import TASK
from tasks import facts_of, generate_problems, split_sentences

TASKS = Path(__file__).parent.parent / "tasks.py"


def test_splits_share_no_problem_whatever_the_order_of_facts_and_the_seed():
    splits = [{frozenset(facts_of(p.goal)) for seed in (0, 1)
               for p in generate_problems(TASK, split, 1000, seed)}
              for split in ("train", "validation", "test")]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert generate_problems(TASK, "train", 50, 3) == generate_problems(TASK, "train", 50, 3)
    assert generate_problems(TASK, "train", 50, 3) != generate_problems(TASK, "train", 50, 4)


def test_the_largest_split_of_easy_problems_can_be_made_and_no_larger_one_is_tried():
    """The smallest split has 5924; the loop would look for ever for one more."""
    assert len(generate_problems(TASK, "validation", TASK.sizes[2], facts=2)) == TASK.sizes[2]
    with pytest.raises(UserError, match="at most 4,000 problems of 2 facts"):
        generate_problems(TASK, "validation", TASK.sizes[2] + 1, facts=2)
    with pytest.raises(UserError, match="2 or 3 facts, not 4"):
        generate_problems(TASK, "train", 1, facts=4)


def test_sentences_are_cut_as_the_human_reveals_them():
    sentences = split_sentences("Tom has 7.5 apples. He eats 2! How many?")
    assert sentences == ["Tom has 7.5 apples.", "He eats 2!", "How many?"]


def test_maths_is_never_cut_and_prices_are_no_maths():
    assert split_sentences("Let $f(x) = 2. X$ and $y = 5.$ Find $y$.") == [
        "Let $f(x) = 2. X$ and $y = 5.$", "Find $y$."]
    assert split_sentences(r"Solve \[x = 1. Y = 2.\] Then \(a. B\) is $$c. D$$. Why?") == [
        r"Solve \[x = 1. Y = 2.\]", r"Then \(a. B\) is $$c. D$$.", "Why?"]
    assert split_sentences("Tom has $5. Anna has $7. How much is left of \\$9?") == [
        "Tom has $5.", "Anna has $7.", "How much is left of \\$9?"]


def run(*flags):
    return subprocess.run([sys.executable, TASKS, *flags], capture_output=True, text=True, timeout=60)


def test_generated_problems_can_be_written_to_a_file_and_read_again(tmp_path):
    path = tmp_path / "easy.jsonl"
    path.write_text(run("--generate", "20", "--facts", "2", "--split", "test", "--seed", "3").stdout)
    again = read_problems(str(path), with_algebra(TASK))
    assert again == generate_problems(TASK, "test", 20, seed=3, facts=2)


@pytest.mark.parametrize("flags", (["--generate", "5000", "--facts", "2"], ["--generate", "0"],
                                   ["--facts", "4"], ["--gen", "1"]))
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags):
    done = run(*flags)
    assert done.returncode == 2 and done.stderr.startswith("tasks.py: ") and done.stderr.count("\n") == 1
