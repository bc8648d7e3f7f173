"""The language model: a decoder-only transformer in plain PyTorch.

RMSNorm, rotary positions, grouped-query attention and a gated feed-forward, as in Llama (arXiv 2302.13971).
Policy, reference and simulator are all instances of this one class, from 0.1 M parameters to 7 B. Two things
matter to reinforcement learning on dialogues:

1. With a `KVCache` every turn computes only its new tokens. They come as a rectangle (B, T), padded on the
   right. Linear layers and norms run only on the R real ones, laid out in one row (1, R); only attention sees
   the rectangle (cache.py has an example). Without a cache, as in training, all layers see the rectangle.
2. A row may hold several dialogues, its `segments`, none of which sees another: training need not pad.

Configurations are Hugging Face's and so are the names of the parameters (extras/hf.py reads and writes them).
How the families differ:

    llama         the plain model; Llama 3 stretches its long rotary wavelengths
    qwen2         biases on queries, keys and values
    qwen3         a norm on every query and key head
    gemma3_text   as qwen3, with two more norms per layer, norm weights that are offsets from 1, scaled
                  embeddings and GELU; most layers see only a sliding window and have other wavelengths

Run `python model.py` to see cached, ragged decoding agree with the full forward.

Shapes: B rows, T tokens, S cached tokens, R real tokens, V vocabulary, D width, L layers, N query heads,
K key heads, E head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig

from cache import KVCache, head_size
from config import UserError

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
ROPES = ("default", "linear", "llama3")
FULL, SLIDING = "full_attention", "sliding_attention"     # the kinds of layer, as config.layer_types has them


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context in which matrices multiply in bf16 if `precision` says so; weights stay in fp32.

    The context casts every weight once and keeps the result: leave it before an optimiser step.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def wide(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or in fp64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tiny_config(vocab_size: int, **sizes) -> LlamaConfig:
    """Return the configuration of the embedded model, 0.1 M parameters; `sizes` replace some of these."""
    return LlamaConfig(**{"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": 2,      # V, D, L
                          "intermediate_size": 192,                # width of the feed-forward
                          "num_attention_heads": 4,                # N
                          "num_key_value_heads": 2,                # K, divides N
                          "head_dim": 16,                          # E, even
                          "max_position_embeddings": 512,          # longest dialogue, in tokens
                          "rms_norm_eps": 1e-5,
                          "tie_word_embeddings": True,             # one matrix for embedding and head
                          "bos_token_id": None, "eos_token_id": None} | sizes)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the kind of every layer, FULL or SLIDING."""
    return getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers


def rope_parameters(config: PreTrainedConfig, kind: str) -> dict:
    """Return the rotary options of a kind of layer; only in Gemma the two kinds differ."""
    return config.rope_parameters.get(kind, config.rope_parameters)


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a configuration that this file does not compute.

    Raises: UserError naming the architecture or the option.
    """
    if config.model_type not in FAMILIES:
        raise UserError(f"{config.model_type} models are not supported, only {', '.join(FAMILIES)}")
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
            raise UserError(f"{config.model_type} with {name} is not supported")
    D, N, K, E = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_size(config)
    if min(D, N, K, E, config.vocab_size, config.num_hidden_layers,
           config.intermediate_size) < 1 or N % K or E % 2:
        raise UserError(f"sizes that fit no model: width {D}, {N} query heads, {K} key heads, head size {E}")


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight (Gemma: 1 + weight)."""

    def __init__(self, width: int, config: PreTrainedConfig):
        super().__init__()
        self.gemma = config.model_type == "gemma3_text"
        self.weight = nn.Parameter(torch.zeros(width) if self.gemma else torch.ones(width))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        if self.gemma:                   # in fp32, since in bf16 1 + a small weight would be rounded to 1
            return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        out = F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        return out.to(x.dtype)           # under autocast x may be bf16 while weight and result are fp32


def frequencies(config: PreTrainedConfig, kind: str, device) -> Tensor:
    """Return the angle (E / 2,) by which each rotary pair turns from one position to the next.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2. Llama 3 (arXiv 2407.21783) divides slow frequencies by
    `factor`, keeps fast ones, and has a ramp between them.
    """
    rope, E = rope_parameters(config, kind), head_size(config)
    frequency = rope["rope_theta"] ** (-torch.arange(0, E, 2, device=device, dtype=torch.float32) / E)
    if rope["rope_type"] == "linear":
        return frequency / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)   # in the old context
        fast = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (fast + (1 - fast) / rope["factor"])
    return frequency


def rotary(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for positions (B, T), (B, 1, T, E) each. Source: RoFormer, eq. 34."""
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

    def forward(self, x: Tensor, rope: tuple, mask: Tensor | None, cache: KVCache | None, T: int) -> Tensor:
        q, k, v = (heads.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)    # (B, N or K, T, E)
                   for heads in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))  # cached: (1, N or K, R, E)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        if cache is not None:                                                      # q becomes a rectangle
            q, (k, v) = cache.padded(q, T), cache.write(self.layer, k, v)          # k, v: (B, K, S, E)
        shape, K = q.shape, k.shape[1]
        grouped = T == 1 and (q.is_cuda or q.dtype != torch.float32)      # no gain in fp32 on a CPU
        if grouped:          # the query heads that share a key head become its queries: each key is read once
            q = q.reshape(len(q), K, -1, self.head_size)                           # (B, K, N / K, E)
        elif mask is not None and q.is_cuda:         # no fast kernel takes both a mask and grouped heads
            k, v = (heads.repeat_interleave(q.shape[1] // K, dim=1) for heads in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                             scale=self.scale, enable_gqa=not grouped)
        out = out.reshape(shape).transpose(1, 2)                                   # (B, T, N, E)
        if cache is not None:
            out = out[cache.rows, cache.offsets][None]                             # (1, R, N, E)
        return self.o_proj(out.flatten(2))


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
    """One layer: attention, then feed-forward; each reads a norm of the stream x and adds its output to it.

    Gemma also norms the outputs, and gives its four norms other names.
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


class Transformer(nn.Module):
    """A decoder-only language model. With seed None its weights are not drawn: load some."""

    def __init__(self, config: PreTrainedConfig, seed: int | None = 0):
        super().__init__()
        check_config(config)
        self.config = config
        self.softcap = getattr(config, "final_logit_softcapping", None)     # a tanh keeps logits below it
        self.cuda_graphs = False         # whether engines replay their token loop as a CUDA graph
        self.model = nn.ModuleDict({                                         # with Hugging Face's names
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config)})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if seed is not None:
            self.initialise(torch.Generator().manual_seed(seed))
        self.tie()

    def initialise(self, generator: torch.Generator) -> None:
        """Draw every matrix with std 1 / sqrt(inputs), which keeps vectors their size; set biases to zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            if parameter.dim() > 1:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))     # added to the stream: smaller
                std = parameter.shape[1] ** -0.5 / (self.config.num_hidden_layers ** 0.5 if deep else 1)
                nn.init.normal_(parameter, std=std, generator=generator)

    def tie(self) -> None:
        """Let embedding and head share one matrix where the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of keys and values: autocast's where it is on, else that of the weights."""
        kind = self.device.type
        on = torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if on else self.model.embed_tokens.weight.dtype

    def forward(self, tokens: Tensor, cache: KVCache | None = None, counts: Tensor | None = None,
                segments: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, T, D) of `tokens` (B, T), padded on the right.

        With a cache, the first `counts` (B,) tokens of each row are real; they follow those that the row
        already holds. Hidden states of padding mean nothing. `segments` (B, T) numbers the dialogues of a row
        that holds several: each starts at position 0 and sees only itself.
        """
        B, T = tokens.shape
        positions, S = torch.arange(T, device=tokens.device).expand(B, T), T
        if segments is not None:
            starts = torch.where(segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0, positions, 0)
            positions = positions - starts.cummax(dim=1).values
        x, rope_positions = self.model.embed_tokens(tokens), positions
        if cache is not None:
            cache.place(counts, T)
            positions, S = cache.lengths[:, None] + positions, cache.longest
            x, rope_positions = (values[cache.rows, cache.offsets][None]         # (1, R, D) and (1, R)
                                 for values in (x, positions))
        if self.config.model_type == "gemma3_text":
            x = x * torch.tensor(self.config.hidden_size ** 0.5, dtype=x.dtype).item()   # in x's precision
        kinds = layer_types(self.config)
        ropes, masks = {}, {}
        for kind in set(kinds):
            cos, sin = rotary(rope_positions, frequencies(self.config, kind, tokens.device))
            ropes[kind] = cos.to(x.dtype), sin.to(x.dtype)
            masks[kind] = self.attention_mask(positions, S, kind, cache is not None, segments)
        for layer, kind in zip(self.model.layers, kinds):
            x = layer(x, ropes[kind], masks[kind], cache, T)
        x = self.model.norm(x)
        if cache is None:
            return x
        cache.lengths += counts
        return cache.padded(x[:, None], T)[:, 0]                                         # (B, T, D)

    def attention_mask(self, positions: Tensor, S: int, kind: str, cached: bool,
                       segments: Tensor | None) -> Tensor | None:
        """Return which of S keys each position (B, T) sees, (B, 1, T, S); None is plain causal attention."""
        window = self.config.sliding_window if kind == SLIDING else S
        if not cached and segments is None and window >= S:
            return None
        keys_at = torch.arange(S, device=positions.device)[None] if segments is None else positions
        distance = positions[:, :, None] - keys_at[:, None]
        seen = (distance >= 0) & (distance < window)
        if segments is not None:
            seen &= segments[:, :, None] == segments[:, None]
        return seen[:, None]

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of the next token, in the type that matrices multiply in."""
        scores = self.lm_head(hidden)
        return self.softcap * torch.tanh(wide(scores) / self.softcap) if self.softcap else scores

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of the next token, in fp32 at least."""
        return wide(self.scores(hidden))


def trainable(model: Transformer) -> list[nn.Parameter]:
    """Return what an optimiser may change: all parameters, or the adapters if there are any."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def main() -> None:
    """Feed two rows of unequal length piece by piece and compare with the full forward."""
    model = Transformer(tiny_config(vocab_size=100)).double()
    tokens = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config, batch=2, dtype=torch.float64)
    model(tokens[:, :6], cache, torch.tensor([6, 3]))              # row 1: 3 real tokens, then 3 of padding
    rest = torch.stack([tokens[0, 6:9], tokens[1, 3:6]])
    cached = model.logits(model(rest, cache, torch.tensor([3, 3])))
    full = model.logits(model(tokens))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    print("hidden states fed piece by piece through the cache, against the whole rows at once:")
    for row, start in ((0, 6), (1, 3)):
        difference = (cached[row] - full[row, start:start + 3]).abs().max()
        print(f"row {row}, tokens {start} to {start + 2}: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
