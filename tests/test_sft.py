"""Supervised fine-tuning."""

import copy

import pytest
import torch

from config import UserError
from logprobs import token_logprobs
from logs import write_logs
from sft import examples_nll, sft
from simulator import simulator_messages
from task_math import TASK
from tasks import generate_problems


def rendered_logs(chat):
    logs = write_logs(TASK, generate_problems(TASK, "train", 20), "human", 0)
    return [chat.render(log["messages"]) for log in logs]


def test_fine_tuning_lowers_the_loss_and_the_same_seed_gives_the_same_weights(chat, model):
    examples = rendered_logs(chat)
    weights = []
    for _ in range(2):
        again = copy.deepcopy(model)
        losses = sft(again, examples, steps=12, batch=8, lr=1e-2, seed=0)
        assert losses[-1] < 0.8 * losses[0]
        weights.append(again.lm_head.weight)
    assert torch.equal(*weights)


def test_the_split_into_micro_batches_does_not_change_the_loss(chat, model):
    examples = rendered_logs(chat)
    losses = [sft(copy.deepcopy(model), examples, steps=3, batch=8, lr=1e-3, seed=0, token_budget=size)
              for size in (1, 200, 4096)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] == pytest.approx(losses[2], rel=1e-6)


def test_dialogues_without_a_token_to_learn_are_refused(chat, model):
    with pytest.raises(UserError, match="no dialogue has a token to learn"):
        sft(model, [([1, 2], [0, 0])], steps=1, batch=1, lr=1e-3, seed=0)


def test_scoring_many_examples_together_gives_what_each_has_alone(model, chat):
    """Packed rows and any budget: no dialogue may see another, and each gets its own tokens back."""
    examples = [chat.render(simulator_messages(log))
                for log in write_logs(TASK, generate_problems(TASK, "train", 6), "human", 0)]
    alone = [-token_logprobs(model, torch.tensor([ids]), torch.tensor([mask])).sum().item()
             for ids, mask in examples]
    for token_budget in (1, 200, 4096):
        together = examples_nll(model, examples, token_budget)
        assert [nll for nll, _ in together] == pytest.approx(alone, rel=1e-9)
        assert [count for _, count in together] == [sum(mask) for _, mask in examples]
