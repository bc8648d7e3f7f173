"""Parity on real weights: `SMOLLM2=smollm2 python -m pytest tests/test_smollm2.py`, as in the README."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from cache import KVCache
from extras.hf import load_speaker
from task_math import TASK
from tasks import generate_problems

FOLDER = os.environ.get("SMOLLM2", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="SMOLLM2 does not name a folder")


@pytest.fixture(scope="module")
def speakers():
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return theirs, *load_speaker(FOLDER, TASK.policy_instruction)


@torch.no_grad()
def test_greedy_replies_to_20_prompts_are_those_of_transformers_for_64_tokens(speakers):
    """Token by token through our cache against `generate`; past the first stop as well."""
    theirs, ours, chat = speakers
    for problem in generate_problems(TASK, "test", 20):
        ids = torch.tensor([chat.open(problem.goal)])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64,
                                   min_new_tokens=64, do_sample=False, repetition_penalty=1.0,
                                   eos_token_id=None)[0, ids.shape[1]:]
        cache, tokens, new = KVCache(ours.config, 1), [], ids
        while len(tokens) < 64:
            hidden = ours(new, cache, torch.tensor([new.shape[1]]))
            tokens.append(int(ours.logits(hidden[0, -1]).argmax()))
            new = torch.tensor([tokens[-1:]])
        assert tokens == expected.tolist()


@torch.no_grad()
def test_logits_are_those_of_transformers(speakers):
    theirs, ours, chat = speakers
    goals = [problem.goal for problem in generate_problems(TASK, "test", 8)]
    ids = torch.tensor([chat.open(" ".join(goals))])
    difference = (ours.logits(ours(ids)) - theirs(ids).logits).abs().max()
    print(f"largest difference of logits over {ids.shape[1]} positions: {difference:.1e}")
    assert difference < 1e-3
