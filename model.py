"""The language model: a decoder-only transformer in plain PyTorch.

RMSNorm, rotary positions, grouped-query attention and a gated feed-forward, as in Llama (arXiv 2302.13971).
Policy, reference and simulator are all this one class, whether they have 0.1 M parameters or 7 B. Three
things matter to reinforcement learning on dialogues:

1. `KVCache` keeps a length per row, because the dialogues of a batch grow at different speeds: every turn
   feeds only what is new, and rows that have nothing new are padded on the right without leaving a trace.
2. `token_logprobs` is the only place where predictions are shifted by one. Everywhere else index t speaks
   about token t.
3. `add_adapters` trains a low-rank correction where the whole model does not fit (LoRA); the reference is
   then the same weights with the adapters off.

Configurations are Hugging Face's and so are the names of the parameters (weights.py reads and writes them).
What the families differ in:

    llama         the plain model; Llama 3 stretches its long rotary wavelengths
    qwen2         biases on queries, keys and values
    qwen3         a norm on every query and key head
    gemma3_text   the same, four norms a layer whose weights are offsets from 1, scaled embeddings, GELU, and
                  five layers of six that see only a sliding window, with rotary wavelengths of their own

Run `python model.py` to see cached, ragged decoding agree with the full forward.

Shapes: B rows, T tokens, S cached tokens, V vocabulary, D width, L layers, N query heads, K key heads, E head
size.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
ROPES = ("default", "linear", "llama3")
FULL, SLIDING = "full_attention", "sliding_attention"     # the kinds of layer, as config.layer_types has them


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which matrices multiply in bf16 if `precision` says so; weights stay in fp32.

    Weights are cast once a context: nothing may be computed in it after an optimiser step.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def tiny_config(vocab_size: int, **sizes) -> LlamaConfig:
    """Return the configuration of the embedded model, 0.1 M parameters; `sizes` replace its own."""
    return LlamaConfig(**{"vocab_size": vocab_size,                # V
                          "hidden_size": 64,                       # D
                          "intermediate_size": 192,                # width of the feed-forward
                          "num_hidden_layers": 2,                  # L
                          "num_attention_heads": 4,                # N
                          "num_key_value_heads": 2,                # K, divides N
                          "head_dim": 16,                          # E, even
                          "max_position_embeddings": 512,          # longest dialogue, in tokens
                          "rms_norm_eps": 1e-5,
                          "tie_word_embeddings": True,             # one matrix for embedding and head
                          "bos_token_id": None, "eos_token_id": None} | sizes)


def head_size(config: PreTrainedConfig) -> int:
    """Return E."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the kind of every layer."""
    return getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers


def rope_parameters(config: PreTrainedConfig, kind: str) -> dict:
    """Return the rotary options of a kind of layer; only Gemma's kinds differ."""
    return config.rope_parameters.get(kind, config.rope_parameters)


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what this file does not compute.

    Raises: ValueError naming the architecture or the option.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"{config.model_type} models are not supported, only {', '.join(FAMILIES)}")
    gemma = config.model_type == "gemma3_text"
    activation = config.hidden_activation if gemma else config.hidden_act
    ropes = [rope_parameters(config, kind) for kind in set(layer_types(config))]
    unsupported = {
        f"the activation {activation}": activation != ("gelu_pytorch_tanh" if gemma else "silu"),
        **{f"{rope.get('rope_type')} rotary scaling": rope.get("rope_type") not in ROPES for rope in ropes},
        "partial_rotary_factor": any(rope.get("partial_rotary_factor", 1) != 1 for rope in ropes),
        **{name: getattr(config, name, None) for name in
           ("mlp_bias", "attn_logit_softcapping", "use_bidirectional_attention", "quantization_config")},
        f"layer types other than {FULL} and {SLIDING}": set(layer_types(config)) - {FULL, SLIDING}}
    for name, found in unsupported.items():
        if found:
            raise ValueError(f"{config.model_type} with {name} is not supported")
    D, N, K, E = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_size(config)
    if min(D, N, K, E, config.vocab_size, config.num_hidden_layers,
           config.intermediate_size) < 1 or N % K or E % 2:
        raise ValueError(f"sizes that fit no model: width {D}, {N} query heads, {K} key heads, head size {E}")


class KVCache:
    """Keys and values of B dialogues, each with its own length; the capacity grows when it has to.

    One slot beyond the capacity takes the writes of padding, so that they never meet a real token.

    Shapes: keys and values of a layer (B, K, capacity + 1, E); lengths (B,).
    """

    def __init__(self, config: PreTrainedConfig, batch: int, device=None, dtype=None):
        empty = torch.zeros(batch, config.num_key_value_heads, 1, head_size(config), device=device,
                            dtype=dtype)
        self.keys = [empty] * config.num_hidden_layers
        self.values = [empty] * config.num_hidden_layers
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 0                   # no row is longer: attention reads no further

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold before the cache must grow."""
        return self.keys[0].shape[2] - 1

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens a row, at least doubling what there is."""
        if tokens > self.capacity:
            more = max(tokens, 2 * self.capacity) - self.capacity
            for tensors in (self.keys, self.values):
                for layer, old in enumerate(tensors):
                    tensors[layer] = F.pad(old, (0, 0, 0, more))

    def keep(self, rows: Tensor) -> None:
        """Drop every dialogue but `rows`."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old[rows]                     # a layer at a time: never two whole caches
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, K, T, E) at `slots` (B, T); return all keys and values up to the longest row."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        self.keys[layer][rows, :, slots] = k.transpose(1, 2)
        self.values[layer][rows, :, slots] = v.transpose(1, 2)
        return self.keys[layer][:, :, :self.longest], self.values[layer][:, :, :self.longest]


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight (Gemma: 1 + weight)."""

    def __init__(self, width: int, config: PreTrainedConfig):
        super().__init__()
        self.gemma = config.model_type == "gemma3_text"
        self.weight = nn.Parameter(torch.zeros(width) if self.gemma else torch.ones(width))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        if self.gemma:                                      # 1 + a small weight in bf16 would lose the weight
            return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        out = F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        return out.to(x.dtype)                    # autocast mixes types: bf16 heads, fp32 weights and results


def frequencies(config: PreTrainedConfig, kind: str, device) -> Tensor:
    """Return the angle (E / 2,) that a position adds to each rotary pair, in a kind of layer.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2; Llama 3 divides the slow ones by `factor` and keeps the
    fast ones, with a ramp between (arXiv 2407.21783; the numbers are in its configuration).
    """
    rope, E = rope_parameters(config, kind), head_size(config)
    frequency = rope["rope_theta"] ** (-torch.arange(0, E, 2, device=device, dtype=torch.float32) / E)
    if rope["rope_type"] == "linear":
        return frequency / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)   # over the old context
        fast = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (fast + (1 - fast) / rope["factor"])
    return frequency


def rotary(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, (B, 1, T, E) each. Source: RoFormer, eq. 34."""
    angle = positions[:, None, :, None].float() * torch.cat([frequency, frequency])
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+E/2}) of x (B, heads, T, E) by its angle."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention, with or without a cache. Source: GQA, arXiv 2305.13245."""

    def __init__(self, config: PreTrainedConfig, layer: int):
        super().__init__()
        D, E, self.layer, family = config.hidden_size, head_size(config), layer, config.model_type
        bias = family == "qwen2" or getattr(config, "attention_bias", False)
        self.q_proj = nn.Linear(D, config.num_attention_heads * E, bias=bias)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * E, bias=bias)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * E, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * E, D, bias=bias and family != "qwen2")
        normed = family in ("qwen3", "gemma3_text")
        self.q_norm, self.k_norm = (RMSNorm(E, config) if normed else nn.Identity() for _ in range(2))
        self.head_size = E
        self.scale = config.query_pre_attn_scalar ** -0.5 if family == "gemma3_text" else E ** -0.5

    def forward(self, x: Tensor, rope: tuple, mask: Tensor | None, cache: KVCache | None, slots) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_size).transpose(1, 2)           # (B, N or K, T, E)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        if cache is not None:
            k, v = cache.write(self.layer, k, v, slots)                            # (B, K, S, E)
        grouped = T == 1 and q.dtype != torch.float32    # in half precision every head would repack its keys
        if grouped:             # the query heads of a key head become queries of one: keys are read once
            q = q.view(B, k.shape[1], -1, self.head_size)                          # (B, K, N / K, E)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                             scale=self.scale, enable_gqa=not grouped)
        return self.o_proj(out.reshape(B, 1, -1) if grouped else out.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """A gated feed-forward, down(act(gate(x)) * up(x)). Source: arXiv 2002.05202."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = nn.GELU(approximate="tanh") if config.model_type == "gemma3_text" else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normed first and added to the stream.

    Gemma also norms what is added, and calls the four norms by other names.
    """

    def __init__(self, config: PreTrainedConfig, layer: int):
        super().__init__()
        D, self.gemma = config.hidden_size, config.model_type == "gemma3_text"
        self.input_layernorm = RMSNorm(D, config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(D, config)
        if self.gemma:
            self.pre_feedforward_layernorm = RMSNorm(D, config)
            self.post_feedforward_layernorm = RMSNorm(D, config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, *attention_inputs) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), *attention_inputs)
        if self.gemma:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face keeps under the prefix `model.`"""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)


class Transformer(nn.Module):
    """A decoder-only language model; without a seed its weights are still to be loaded."""

    def __init__(self, config: PreTrainedConfig, seed: int | None = 0):
        super().__init__()
        check_config(config)
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if seed is not None:
            self.initialise(torch.Generator().manual_seed(seed))
        self.tie()

    def initialise(self, generator: torch.Generator) -> None:
        """Draw every matrix from a normal distribution that keeps the size of its inputs; biases are zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            if parameter.dim() > 1:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))     # adds to the stream: smaller
                std = parameter.shape[1] ** -0.5 / (self.config.num_hidden_layers ** 0.5 if deep else 1)
                nn.init.normal_(parameter, std=std, generator=generator)

    def tie(self) -> None:
        """Let embedding and head share one matrix where the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """What keys and values come in: autocast's type where it is on, else that of the weights."""
        kind = self.device.type
        on = torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if on else self.lm_head.weight.dtype

    def forward(self, tokens: Tensor, cache: KVCache | None = None, counts: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, T, D) of `tokens` (B, T), right padded.

        With a cache, `counts` (B,) says how many tokens of each row are real; they follow what the row holds
        already. Hidden states of padding are meaningless.
        """
        B, T = tokens.shape
        offsets, slots, S = torch.arange(T, device=tokens.device), None, T
        positions = offsets.expand(B, T)
        if cache is not None:
            cache.longest = S = cache.longest + T
            cache.reserve(S)
            positions = cache.lengths[:, None] + offsets
            real = offsets < counts[:, None]
            slots = torch.where(real, positions, cache.capacity)                   # padding: the spare slot
        x = self.model.embed_tokens(tokens)
        if self.config.model_type == "gemma3_text":
            x = x * torch.tensor(self.config.hidden_size ** 0.5, dtype=x.dtype, device=x.device)
        kinds = layer_types(self.config)
        ropes, masks = {}, {}
        for kind in set(kinds):
            cos, sin = rotary(positions, frequencies(self.config, kind, tokens.device))
            ropes[kind] = cos.to(x.dtype), sin.to(x.dtype)
            masks[kind] = self.attention_mask(positions, S, kind, cached=cache is not None)
        for layer, kind in zip(self.model.layers, kinds):
            x = layer(x, ropes[kind], masks[kind], cache, slots)
        if cache is not None:
            cache.lengths = cache.lengths + counts
        return self.model.norm(x)

    def attention_mask(self, positions: Tensor, S: int, kind: str, cached: bool) -> Tensor | None:
        """Return what each position (B, T) sees of the first S, (B, 1, T, S); None for plain causal
        attention.
        """
        window = self.config.sliding_window if kind == SLIDING else S
        if not cached and window >= S:
            return None
        distance = positions[..., None] - torch.arange(S, device=positions.device)
        return ((distance >= 0) & (distance < window))[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores (..., V) of the token that follows, in fp32 at least."""
        scores = self.lm_head(hidden)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return cap * torch.tanh(scores / cap) if cap else scores


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


# Adapters ---------------------------------------------------------------------------------------------------

class Adapter(nn.Module):
    """A frozen linear layer and a trainable correction of low rank to it. Source: LoRA, arXiv 2106.09685, eq.
    3 with alpha = 2 rank.

    The correction starts at zero: `expand` is zero, `reduce` is not.
    """
    SCALE = 2.0                                                                          # alpha / rank

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        reduce = torch.randn(rank, base.in_features, generator=generator) / base.in_features ** 0.5
        self.base = base
        self.reduce = nn.Parameter(reduce.to(base.weight.device))                        # (rank, in), fp32
        self.expand = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        correction = F.linear(F.linear(x, self.reduce.to(x.dtype)), self.expand.to(x.dtype))
        return self.base(x) + self.SCALE * correction

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight of the one linear layer that computes the same."""
        return (self.base.weight + self.SCALE * self.expand @ self.reduce).to(self.base.weight.dtype)


def add_adapters(model: Transformer, rank: int, seed: int) -> None:
    """Freeze a model and put an adapter around every linear layer of its blocks."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapter(child, rank, generator))


def trainable(model: Transformer) -> list[nn.Parameter]:
    """Return what an optimiser may change: everything, or the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def reference_of(policy: Transformer) -> Transformer:
    """Return a policy as it is before training: a copy that shares frozen weights, with its adapters off."""
    shared = {id(parameter): parameter for parameter in policy.parameters() if not parameter.requires_grad}
    reference = copy.deepcopy(policy, shared).requires_grad_(False)
    for module in list(reference.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Adapter):
                setattr(module, name, child.base)
    return reference


def main() -> None:
    """Feed two rows of unequal length in ragged pieces and compare with the full forward."""
    model = Transformer(tiny_config(vocab_size=100)).double()
    tokens = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config, batch=2, dtype=torch.float64)
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
