"""What extras/bench.py compares does the same work on both sides."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from extras import bench
from extras.bench import (our_dialogues, packed_step, padded_step, plain_update, random_texts,
                          their_dialogues, write_csv)
from extras.floor import rollout_floor
from grpo import update
from model import Transformer, tiny_config

CONFIG = tiny_config(vocab_size=60, hidden_size=16, intermediate_size=32, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8)


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_plain_and_our_update_take_the_same_gradient():
    model = Transformer(CONFIG).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(60, (4, 12), generator=generator)
    mask = (torch.arange(12) // 3 % 2 == 1).expand(4, -1)
    batch = (tokens, mask, torch.full((4, 12), -4.0).double(), torch.randn(4, generator=generator).double())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for take in (lambda: plain_update(model, optimiser, *batch, micro_batch=4),
                 lambda: plain_update(model, optimiser, *batch, micro_batch=1),
                 lambda: update(model, optimiser, *batch, token_budget=24)):
        take()
        found.append(gradients(model))
    assert torch.allclose(found[0], found[1], atol=1e-12) and torch.allclose(found[0], found[2], atol=1e-12)


def test_padded_and_packed_steps_take_the_same_gradient():
    model = Transformer(CONFIG).double()
    examples = [(list(range(1, n + 1)), [t % 2 for t in range(n)]) for n in (5, 9, 3, 7, 4)]
    found = []
    for take in (lambda: padded_step(model, examples, 2), lambda: packed_step(model, examples, 20)):
        model.zero_grad()
        take()
        found.append(gradients(model))
    assert torch.allclose(*found, atol=1e-12)


@pytest.mark.parametrize("stops", ([], list(range(1, 31))))
def test_both_sides_of_a_rollout_sample_tokens_until_they_stop(stops):
    """Three dialogues, two turns of 6 tokens; with stop tokens every other token ends a reply."""
    torch.manual_seed(0)                                                           # theirs draws from a state
    model = Transformer(CONFIG).eval()
    theirs = AutoModelForCausalLM.from_config(CONFIG).eval()
    theirs.load_state_dict(model.state_dict())
    openings, messages = random_texts(CONFIG, 3, 2, (4, 9), (2, 5))
    counts = (our_dialogues(model, openings, messages, 6, "fp32", stops),
              their_dialogues(theirs, openings, messages, 6, stops))
    assert counts == (36, 36) if not stops else all(6 <= count < 36 for count in counts)
    again = random_texts(CONFIG, 3, 2, (4, 9), (2, 5))[0]
    assert [len(ids) for ids in openings] == [len(ids) for ids in again]                 # and neither changed


def test_the_floor_of_a_rollout_by_hand():
    """Two openings of 3 tokens, one turn of 2: at a rate of 1 the first pass takes 2 x (6 blocks + 2 heads),
    the second 2 x (blocks + head) x 2 rows.
    """
    model = Transformer(CONFIG)
    blocks = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    head = 60 * 16
    expected = 2 * (6 * blocks + 2 * head) + 2 * (blocks + head) * 2
    assert rollout_floor(model, [[1, 2, 3]] * 2, [[[4]] * 2], 2, "fp32", float("inf"), 1.0) == expected


def test_a_row_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CSV", tmp_path / "bench.csv")
    for what, theirs in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        write_csv([bench.line(what, "s", theirs, 1.0, 0.5)])
    lines = (tmp_path / "bench.csv").read_text().splitlines()
    assert lines == ["what,unit,theirs,ours,ratio,floor", "a,s,3,1,3,0.5", "b,s,2,1,2,0.5"]
