"""The language model: a Llama-style decoder-only transformer in plain PyTorch.

RMSNorm, rotary positions, grouped-query attention and a SwiGLU feed-forward, as in Llama (arXiv 2302.13971).
Policy, reference and simulator are all this one class. Three things matter to reinforcement learning on
dialogues:

1. `KVCache` keeps a length per row, because the dialogues of a batch grow at different speeds: every turn
   feeds only what is new, and rows that have nothing new are padded on the right without leaving a trace.
2. `token_logprobs` is the only place where predictions are shifted by one. Everywhere else index t speaks
   about token t.
3. Parameter and configuration names are Hugging Face's `llama`, so that a saved model opens in transformers.

Run `python model.py` to see cached, ragged decoding agree with the full forward.

Shapes: B rows, T tokens, S cached tokens, V vocabulary, D width, L layers, N query heads, K key heads, E head
size.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, under the names that Hugging Face uses in `config.json`."""
    vocab_size: int                        # V
    hidden_size: int = 64                  # D
    intermediate_size: int = 192           # width of the feed-forward
    num_hidden_layers: int = 2             # L
    num_attention_heads: int = 4           # N
    num_key_value_heads: int = 2           # K, divides N
    head_dim: int = 16                     # E, even
    max_position_embeddings: int = 512     # longest dialogue, in tokens
    rope_theta: float = 10_000.0           # base of the rotary wavelengths
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True       # one matrix for embedding and head


class KVCache:
    """Keys and values of B dialogues, each with its own length.

    One slot beyond `capacity` takes the writes of padding, so that they never meet a real token.

    Shapes: keys and values (L, B, K, capacity + 1, E); lengths (B,).
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device=None, dtype=None):
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity + 1, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.capacity = capacity
        self.longest = 0                   # no row is longer: attention reads no further

    def keep(self, rows: Tensor) -> None:
        """Drop every dialogue but `rows`."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, K, T, E) at `slots` (B, T); return all keys and values up to the longest row."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        self.keys[layer][rows, :, slots] = k.transpose(1, 2)
        self.values[layer][rows, :, slots] = v.transpose(1, 2)
        return self.keys[layer, :, :, :self.longest], self.values[layer, :, :, :self.longest]


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, (B, 1, T, E) each. Source: RoFormer, arXiv 2104.09864,
    eq. 34.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions.device,
                                        dtype=torch.float32) / head_dim)
    angle = positions[:, None, :, None].float() * torch.cat([frequency, frequency])
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+E/2}) of x (B, heads, T, E) by its angle."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention, with or without a cache. Source: GQA, arXiv 2305.13245."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        D, E = config.hidden_size, config.head_dim
        self.layer, self.head_dim = layer, E
        self.q_proj = nn.Linear(D, config.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * E, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, slots, mask) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)           # (B, N or K, T, E)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.write(self.layer, k, v, slots)                            # (B, K, S, E)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: arXiv 2002.05202."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, *attention_inputs) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention_inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face keeps under the prefix `model.`"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # these add to the stream: start smaller
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = parameter.shape[1] ** -0.5 / (config.num_hidden_layers ** 0.5 if deep else 1)
                nn.init.normal_(parameter, std=std, generator=generator)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def forward(self, tokens: Tensor, cache: KVCache | None = None, counts: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, T, D) of `tokens` (B, T), right padded.

        With a cache, `counts` (B,) says how many tokens of each row are real; they follow what the row holds
        already. Hidden states of padding are meaningless.

        Raises: ValueError if the tokens do not fit into the cache.
        """
        B, T = tokens.shape
        offsets = torch.arange(T, device=tokens.device)
        if cache is None:
            positions, slots, mask = offsets.expand(B, T), None, None
        else:
            if cache.longest + T > cache.capacity:             # padding may not fit, real tokens must
                cache.longest = int((cache.lengths + counts).max())
                if cache.longest > cache.capacity:
                    raise ValueError(f"{cache.longest} tokens do not fit into a cache of {cache.capacity}")
            else:
                cache.longest += T
            positions = cache.lengths[:, None] + offsets                                         # (B, T)
            # padding: the spare slot
            slots = torch.where(offsets < counts[:, None], positions, cache.capacity)
            mask = torch.arange(cache.longest, device=tokens.device) <= positions[..., None]   # (B, T, S)
            mask = mask[:, None]                                                               # (B, 1, T, S)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos.to(x.dtype), sin.to(x.dtype), cache, slots, mask)
        if cache is not None:
            cache.lengths = cache.lengths + counts
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores (..., V) of the token that follows."""
        return self.lm_head(hidden)


def token_logprobs(model: Transformer, tokens: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log p(tokens[b, t] | tokens[b, :t]) at temperature, where `mask` is true, and 0 elsewhere.

    Only the positions asked for go through the head: a dialogue's user tokens cost no logits. Rows are right
    padded; causality keeps padding out, so ids never decide what is padding.

    Shapes: tokens (B, T), mask (B, T) -> (B, T). Position 0 has no context: its mask must be false.
    """
    assert tokens.shape == mask.shape, f"tokens {tuple(tokens.shape)} and mask {tuple(mask.shape)} differ"
    mask = mask.bool()
    assert not mask[:, 0].any(), "position 0 has no context, so no log-probability"
    hidden = model(tokens)[:, :-1][mask[:, 1:]]                                # (A, D), A positions asked for
    logprobs = (model.logits(hidden) / temperature).log_softmax(-1)                # (A, V)
    chosen = logprobs.gather(-1, tokens[:, 1:][mask[:, 1:]][:, None])[:, 0]        # (A,)
    return torch.zeros(tokens.shape, device=tokens.device, dtype=chosen.dtype).masked_scatter(mask, chosen)


def save_model(model: Transformer, folder: str) -> None:
    """Write config.json and model.safetensors as transformers' LlamaForCausalLM reads them."""
    os.makedirs(folder, exist_ok=True)
    config = asdict(model.config)
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
               "torch_dtype": "float32",
               "rope_parameters": {"rope_type": "default", "rope_theta": model.config.rope_theta}}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def load_model(folder: str, device: str = "cpu") -> Transformer:
    """Read a model that `save_model` wrote.

    Raises: ValueError if the folder holds no such model.
    """
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a model: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("model_type") != "llama":
        raise ValueError(f"{folder}/config.json is not the configuration of a llama model")
    kinds = {field.name: field.type for field in fields(ModelConfig)}
    given = {name: config[name] for name in kinds if name in config}
    for name, value in given.items():
        number = float(value) if isinstance(value, (int, float)) else math.nan
        if not (isinstance(value, bool) if kinds[name] is bool else 0 < number < 1e12
                and kinds[name](number) == number):
            raise ValueError(f"{folder}/config.json: {name} cannot be {value!r}")
    try:
        model = Transformer(ModelConfig(**{name: kinds[name](value) for name, value in given.items()}))
        weights = load_file(os.path.join(folder, "model.safetensors"))
        if model.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
    except Exception as error:
        raise ValueError(f"{folder} is not a model that loads: {' '.join(str(error).split())[:99]}") from None
    return model.to(device)


def save_checkpoint(path: Path, step: int, model: Transformer, optimiser: torch.optim.Optimizer) -> None:
    """Write weights and optimiser state; every random draw is keyed by the step, so nothing else is
    needed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, parameter in enumerate(model.parameters()):
        tensors |= {f"{i}.{name}": value.detach().cpu().contiguous() for name,
                    value in optimiser.state[parameter].items()}
        tensors[f"{i}.weight"] = parameter.detach().cpu().contiguous()
    save_file(tensors, str(path) + ".partial", metadata={"step": str(step)})
    os.replace(str(path) + ".partial", path)


@torch.no_grad()
def load_checkpoint(path: Path, model: Transformer, optimiser: torch.optim.Optimizer) -> int:
    """Read what `save_checkpoint` wrote into model and optimiser and return its step; 0 if there is none.

    Raises: ValueError if the file is not one that `save_checkpoint` wrote for such a model.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            step = int(file.metadata()["step"])
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(tensors[f"{i}.weight"])
            moments = {name: tensors[f"{i}.{name}"].to(parameter.device)
                       for name in ("exp_avg", "exp_avg_sq")}
            optimiser.state[parameter] = {"step": tensors[f"{i}.step"], **moments}
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} is not a checkpoint of this model: {error}") from None
    return step


def main() -> None:
    """Feed two rows of unequal length in ragged pieces and compare with the full forward."""
    model = Transformer(ModelConfig(vocab_size=100)).double()
    tokens = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config, batch=2, capacity=12, dtype=torch.float64)
    model(tokens[:, :6], cache, torch.tensor([6, 3]))               # row 1 has 3 real tokens and 3 of padding
    rest = torch.stack([tokens[0, 6:9], tokens[1, 3:6]])
    cached = model.logits(model(rest, cache, torch.tensor([3, 3])))
    full = model.logits(model(tokens))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    print("hidden states fed piece by piece through the cache, against the whole rows at once:")
    print(f"row 0, tokens 6 to 8: largest difference {(cached[0] - full[0, 6:9]).abs().max():.1e}")
    print(f"row 1, tokens 3 to 5: largest difference {(cached[1] - full[1, 3:6]).abs().max():.1e}")


if __name__ == "__main__":
    main()
