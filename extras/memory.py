"""How much memory a run takes on the GPU, counted before any weight is downloaded.

Weights, gradients and optimiser state follow from the configuration. What the update saves for its backward
pass is counted by running model.py on *fake* CPU tensors, which have shapes and no contents. A GPU may save
more: autocast keeps norms in fp32 there, and attention may take another kernel.

Run `python -m extras.memory` to print the README's table.

Units: GB of 10^9 bytes. Not counted: what the allocator loses to fragments, and about 0.5 GB of CUDA's own.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from cache import KVCache
from config import Config
from extras.lora import add_adapters
from logprobs import LOGITS, ChosenLogprobs
from model import Transformer, autocast, trainable

GB = 1e9
# sizes from the models' published config.json
QWEN25 = dict(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True)
MODELS = {
    "SmolLM2-135M": LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1536,
                                num_hidden_layers=30,
                                num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "Qwen2.5-0.5B": Qwen2Config(**QWEN25, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                num_attention_heads=14),
    "Qwen3-0.6B": Qwen3Config(vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
                              num_hidden_layers=28,
                              num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                              tie_word_embeddings=True),
    "Llama-3.2-1B": LlamaConfig(vocab_size=128_256, hidden_size=2048, intermediate_size=8192,
                                num_hidden_layers=16,
                                num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True),
    "Qwen2.5-1.5B": Qwen2Config(**QWEN25, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                                num_attention_heads=12),
    "Gemma-3-4B": Gemma3TextConfig(vocab_size=262_208, hidden_size=2560, intermediate_size=10_240,
                                   num_hidden_layers=34,
                                   num_attention_heads=8, num_key_value_heads=4, head_dim=256,
                                   sliding_window=1024),
    "Qwen2.5-7B": Qwen2Config(vocab_size=152_064, hidden_size=3584, intermediate_size=18_944,
                              num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4)}


def size(tensors: list[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def saved_bytes(model: Transformer, dialogues: int, tokens: int, actions: int) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, and those that the head adds there.

    The former include weights cast to bf16. The latter are a chunk's logits and their gradient and, if the
    head trains, 8 per weight: the weight in bf16, a second gradient in fp32, and the product in bf16 that is
    added to it.
    """
    own, saved = {parameter.untyped_storage()._cdata for parameter in model.parameters()}, {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage                # kept alive, so that its address is not used again
        return tensor

    with saved_tensors_hooks(remember, lambda tensor: tensor), autocast(torch.device("cpu"), "bf16"):
        hidden = model(torch.zeros(dialogues, tokens, dtype=torch.long))[:, :actions].flatten(0, 1)
        ChosenLogprobs.apply(hidden, model.lm_head.weight, torch.zeros(len(hidden), dtype=torch.long), None,
                             1.0, torch.bfloat16)
    chunk = min(len(hidden), max(1, LOGITS // model.config.vocab_size)) * model.config.vocab_size
    head = 8 * model.lm_head.weight.numel() if model.lm_head.weight.requires_grad else 0
    return sum(storage.nbytes() for storage in saved.values()) + 8 * chunk + head


def training_bytes(config: PreTrainedConfig, *, lora_rank: int, dialogues: int, tokens: int,
                   actions: int) -> dict:
    """Return the bytes of each part of training a model in bf16.

    One forward and backward pass takes `dialogues` of so many `tokens`, of which `actions` have a loss.
    Master weights, gradients and both moments of AdamW are fp32; a frozen base is bf16.
    """
    with FakeTensorMode():
        model = Transformer(config, seed=None)
        if lora_rank:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
            add_adapters(model, lora_rank, seed=0)
        return {"weights": size(list(model.parameters())), "gradients": size(trainable(model)),
                "optimiser": 2 * size(trainable(model)),
                "saved": saved_bytes(model, dialogues, tokens, actions)}


def cache_bytes(config: PreTrainedConfig, dialogues: int, tokens: int) -> int:
    """Return the most bytes that keys and values take, in bf16.

    Half of the dialogues may be in a second cache, where they go on while the others wait.
    """
    with FakeTensorMode():
        cache = KVCache(config, dialogues, dtype=torch.bfloat16)
        cache.reserve(tokens)
        return 3 * (size(cache.keys) + size(cache.values)) // 2


def run_bytes(policy: PreTrainedConfig, simulator: PreTrainedConfig, *, lora_rank: int,
              simulator_lora_rank: int, dialogues: int, token_budget: int, tokens: int, actions: int) -> dict:
    """Return the bytes that each phase of a run needs at its peak.

    All dialogues of a step are rolled out together, and go through the update `token_budget` tokens at a
    time.
    """
    shape = dict(dialogues=max(1, token_budget // tokens), tokens=tokens, actions=actions)
    ours, theirs = (training_bytes(config, lora_rank=rank, **shape)
                    for config, rank in ((policy, lora_rank), (simulator, simulator_lora_rank)))
    bf16 = {name: training_bytes(config, lora_rank=1, dialogues=1, tokens=1, actions=1)["weights"]
            for name, config in (("policy", policy), ("simulator", simulator))}
    reference = 0 if lora_rank else bf16["policy"]
    frozen = bf16["simulator"] + reference
    caches = cache_bytes(policy, dialogues, tokens) + cache_bytes(simulator, dialogues, tokens)
    cast = 0 if lora_rank else bf16["policy"]                                # weights that autocast keeps
    return {"calibration": sum(theirs.values()) + ours["weights"],
            "rollout": ours["weights"] + ours["optimiser"] + cast + frozen + caches,
            "update": sum(ours.values()) + frozen}


def main() -> None:
    print(f"{'GB':14s}{'parameters':>12s}{'bf16':>8s}{'trained in full':>18s}{'trained with rank 32':>22s}")
    for name, config in MODELS.items():
        full, lora = (training_bytes(config, lora_rank=rank, dialogues=1, tokens=1, actions=1)
                      for rank in (0, 32))
        states = [sum(parts[part] for part in ("weights", "gradients", "optimiser")) / GB
                  for parts in (full, lora)]
        print(f"{name:14s}{full['weights'] / 4e9:10.2f} B{full['weights'] / 2 / GB:8.1f}"
              f"{states[0]:18.1f}{states[1]:22.1f}")
    print(f"\n{'preset, GB':14s}{'calibration':>12s}{'rollout':>9s}{'update':>8s}")
    shape = dict(dialogues=64, token_budget=Config.token_budget, tokens=2000, actions=800)
    for name, policy, simulator, rank in (("gpu", "Qwen2.5-0.5B", "Qwen2.5-1.5B", 0),
                                          ("paper", "Gemma-3-4B", "Qwen2.5-7B", 32)):
        peaks = run_bytes(MODELS[policy], MODELS[simulator], lora_rank=rank, simulator_lora_rank=32, **shape)
        print(f"{name:14s}" + "{:12.1f}{:9.1f}{:8.1f}".format(*(peak / GB for peak in peaks.values())))


if __name__ == "__main__":
    main()
