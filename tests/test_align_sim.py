"""Calibration: a simulator learns what people say, and nothing else."""

import copy

import torch
from conftest import say

from align_sim import calibrate
from logprobs import token_logprobs
from logs import write_logs
from report_card import model_nll, script_nll
from sft import mean_nll
from simulator import simulator_messages
from task_math import TASK
from tasks import generate_problems


def test_calibration_trains_the_users_tokens_and_exactly_no_others(chat, model):
    """The mask of a logged dialogue, user text and its end-of-turn 1, and the gradient of the loss by
    log-probability.
    """
    ids, mask = chat.render(simulator_messages({"messages": say("hi", "How many?", "5"), "goal": "a goal"}))
    trained = [chat.decode([token]) for token, m in zip(ids, mask) if m]
    assert trained == ["hi", "<|end|>", "5", "<|end|>"]
    logprobs = token_logprobs(model, torch.tensor([ids]), torch.tensor([mask]))
    logprobs.retain_grad()
    (-logprobs[torch.tensor([mask]).bool()].sum()).backward()
    assert (logprobs.grad[0][~torch.tensor(mask).bool()] == 0).all() and (logprobs.grad[0] != 0).sum() == 4


def test_calibration_lowers_the_nll_of_human_turns_towards_the_scripts_own(chat, model):
    problems = generate_problems(TASK, "train", 60)
    logs = write_logs(TASK, problems, "human", 0)
    before = model_nll(model, chat, logs)
    calibrate(model, chat, logs, steps=25, batch=16, lr=1e-2, seed=0)
    after, floor = model_nll(model, chat, logs), [script_nll(TASK.human, log, chat) for log in logs]
    assert [n for _, n in after] == [n for _, n in before] == [n for _, n in floor]
    assert sum(v for v, _ in floor) < sum(v for v, _ in after) < 0.7 * sum(v for v, _ in before)


def test_calibration_on_few_dialogues_stops_before_it_learns_them_by_heart(model, chat):
    """Twelve dialogues, a high learning rate: the loss on two set aside rises again, the minimum is kept."""
    logs = write_logs(TASK, generate_problems(TASK, "train", 12), "human", 0)
    examples = [chat.render(simulator_messages(log)) for log in logs]
    by_heart = copy.deepcopy(model)
    losses = calibrate(model, chat, logs, steps=200, batch=10, lr=1e-2, seed=0, stop_early=True)
    calibrate(by_heart, chat, logs[2:], steps=200, batch=10, lr=1e-2, seed=0)
    assert len(losses) < 200
    assert mean_nll(model, examples[:2]) < mean_nll(by_heart, examples[:2]) - 0.5
