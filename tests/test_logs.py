"""Human logs: how they are split."""

import pytest
from conftest import say

from config import UserError
from logs import split_logs


def test_logs_are_split_by_whole_dialogues_and_one_is_too_few():
    logs = [{"messages": say(str(i))} for i in range(10)]
    train, held_out = split_logs(logs, seed=0)
    assert len(train) == 8 and len(held_out) == 2 and all(log in train or log in held_out for log in logs)
    with pytest.raises(UserError, match="one human dialogue is not enough"):
        split_logs(logs[:1], seed=0)
