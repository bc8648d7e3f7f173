"""What extras/memory.py counts on fake tensors, against a small model that is really trained."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from cache import KVCache
from extras.lora import add_adapters
from extras.memory import MODELS, cache_bytes, run_bytes, size, training_bytes
from logprobs import token_logprobs
from model import Transformer, autocast, tiny_config, trainable

CONFIG = tiny_config(3000, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
SHAPE = dict(dialogues=3, tokens=50, actions=20)


def measured(lora_rank):
    """The same parts of a real model after a step on 3 dialogues of 50 tokens, 20 of them actions."""
    model = Transformer(CONFIG)
    if lora_rank:
        add_adapters(model.to(torch.bfloat16), lora_rank, seed=0)
    optimiser = torch.optim.AdamW(trainable(model))
    mask = torch.zeros(3, 50, dtype=torch.bool)
    mask[:, -20:] = True
    own, saved = {p.data_ptr() for p in model.parameters()}, {}
    with saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t) is None or t, lambda t: t), \
            autocast(model.device, "bf16"):
        loss = -token_logprobs(model, torch.zeros(3, 50, dtype=torch.long), mask).sum()
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved.values()}
    loss.backward()
    optimiser.step()
    moments = [t for state in optimiser.state.values() for name, t in state.items() if name != "step"]
    return {"weights": size(list(model.parameters())), "gradients": size([p.grad for p in trainable(model)]),
            "optimiser": size(moments), "saved": sum(n for at, n in kept.items() if at not in own)}


@pytest.mark.parametrize("lora_rank", (0, 4))
def test_the_count_agrees_with_a_small_model_that_is_really_trained(lora_rank):
    """States to the byte, what is saved within a tenth; the backward pass of the head adds to that."""
    counted, real = training_bytes(CONFIG, lora_rank=lora_rank, **SHAPE), measured(lora_rank)
    saved, logits = counted.pop("saved"), 3 * 20 * 3000 * 8 + (0 if lora_rank else 8 * 3000 * 128)
    assert abs(saved - logits - real.pop("saved")) < 0.1 * saved
    assert counted == real


def test_the_cache_is_counted_with_a_second_one_for_half_of_the_dialogues():
    cache = KVCache(CONFIG, 4, dtype=torch.bfloat16)
    cache.reserve(30)
    assert cache_bytes(CONFIG, 4, 30) == 1.5 * (size(cache.keys) + size(cache.values))


def test_full_training_of_the_papers_policy_does_not_fit_where_adapters_do():
    """Gemma-3-4B in full needs 16 bytes per parameter, 62 GB, before simulator, reference and activations."""
    shape = dict(simulator_lora_rank=32, dialogues=64, token_budget=4096, tokens=2000, actions=800)
    policy, simulator = MODELS["Gemma-3-4B"], MODELS["Qwen2.5-7B"]
    full, adapters = (max(run_bytes(policy, simulator, lora_rank=rank, **shape).values()) for rank in (0, 32))
    assert full > 80e9 > adapters
