"""Human logs: how they end, what their draws depend on, how logs and problems are split."""

import pytest
from conftest import say

from config import UserError
from logs import split_logs, split_problems, write_logs, write_probes
from task_math import TASK
from tasks import LEAVE, generate_problems


@pytest.mark.parametrize("speaker", ("human", "overhelpful"))
def test_a_log_ends_with_an_answer_with_the_user_leaving_or_after_six_turns(speaker):
    for log in write_logs(TASK, generate_problems(TASK, "train", 100), speaker, 0):
        *before, last = [message["content"] for message in log["messages"]]
        assert TASK.ends(last) or last == LEAVE or len(log["messages"]) == 12
        assert LEAVE not in before and not any(TASK.ends(text) for text in before[1::2])
        assert log["messages"] == say(*before, last)                     # they take turns, the user first


def test_the_same_seed_gives_the_same_logs_and_probes_and_each_problem_has_its_own_draws():
    problems = generate_problems(TASK, "validation", 30)
    logs = write_logs(TASK, problems, "human", 0)
    for write in (lambda part, seed: write_logs(TASK, part, "human", seed),
                  lambda part, seed: write_probes(TASK, part, logs, "human", seed)):
        assert write(problems, 0) == write(problems, 0) != write(problems, 1)
        few = write(problems[:9], 0)
        assert few and few == write(problems, 0)[:len(few)]


def test_logs_are_split_by_whole_dialogues_and_one_is_too_few():
    logs = [{"messages": say(str(i))} for i in range(10)]
    train, held_out = split_logs(logs, seed=0)
    assert len(train) == 8 and len(held_out) == 2 and all(log in train or log in held_out for log in logs)
    with pytest.raises(UserError, match="one human dialogue is not enough"):
        split_logs(logs[:1], seed=0)


def test_a_files_problems_are_split_8_1_1_and_two_are_too_few():
    problems = generate_problems(TASK, "train", 40)
    train, validation, test = split_problems(problems, seed=0)
    assert (len(train), len(validation), len(test)) == (32, 4, 4)
    assert sorted(p.id for p in train + validation + test) == list(range(40))
    assert split_problems(problems, seed=0) == (train, validation, test) != split_problems(problems, seed=1)
    assert [len(part) for part in split_problems(problems[:3], seed=0)] == [1, 1, 1]
    with pytest.raises(UserError, match="training, validation and test need one each"):
        split_problems(problems[:2], seed=0)
