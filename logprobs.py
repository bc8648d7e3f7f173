r"""Log-probabilities of tokens, in memory that does not grow with tokens times vocabulary.

All logits at once are what runs out of memory first: 16 dialogues of 2,000 tokens under a vocabulary of
152,000 would take 19 GB. Two decisions keep them small:

1. Only positions that are asked for go through the head: a dialogue's user tokens cost no logits.
2. They go through it a chunk at a time, and the backward pass computes a chunk's logits again. It needs no
   more than the probabilities p, the softmax of the logits z:

       log p_y = z_y - log sum_v exp z_v          d log p_y / dz_v = [v = y] - p_v

`token_logprobs` is the only place where predictions are shifted by one. Everywhere else index t speaks about
token t.

Run `python logprobs.py` to compare with all logits at once.

Shapes: B rows, T tokens, A positions asked for, V vocabulary, D width.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model import Transformer, tiny_config, wide

TOKEN_BUDGET = 4096                           # tokens, padding included, of a forward and backward pass
LOGITS = 2 ** 24                              # that a chunk may have: 64 MiB in fp32, 110 positions of Qwen's


def chunk_probabilities(hidden: Tensor, head: Tensor, chosen: Tensor, cap: float | None,
                        temperature: float) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return all probabilities (A, V) in fp32 at least, the log-probability (A,) of the `chosen` tokens, and
    the derivative of logits with respect to scores.

    `cap` squashes scores s to cap tanh(s / cap), which is Gemma's final_logit_softcapping.
    """
    z, slope = wide(hidden @ head.T), 1 / temperature
    if cap:
        z = (z / cap).tanh_()
        slope = (1 - z.square()) / temperature
        z *= cap
    z /= temperature
    picked, top = z.gather(-1, chosen[:, None]), z.amax(-1, keepdim=True)
    p = z.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    return p.div_(total), (picked - top - total.log())[:, 0], slope


class ChosenLogprobs(torch.autograd.Function):
    """The log-probability (A,) of one token after every hidden state (A, D), never with all (A, V) logits.

    Matrices multiply in `dtype`; what follows is in fp32 at least, and sums over chunks are in the head's own
    type. The gradient can be asked for once.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, chosen: Tensor, cap: float | None, temperature: float,
                dtype: torch.dtype) -> Tensor:
        few, cast, logprobs = max(1, LOGITS // len(head)), head.to(dtype), []
        for h, y in zip(hidden.split(few), chosen.split(few)):
            p, logprob, _ = chunk_probabilities(h.to(dtype), cast, y, cap, temperature)
            logprobs.append(logprob)
        alone = len(logprobs) == 1 and not cap                # then nothing is gained by computing them again
        ctx.save_for_backward(hidden, head, chosen, p if alone else None)
        ctx.options = few, cap, temperature, dtype
        return torch.cat(logprobs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        hidden, head, chosen, kept = ctx.saved_tensors
        few, cap, temperature, dtype = ctx.options
        cast, grad_hidden = head.to(dtype), torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start, (h, y, g) in enumerate(zip(hidden.split(few), chosen.split(few), grad.split(few))):
            h = h.to(dtype)
            p, _, slope = ((kept, None, 1 / temperature) if kept is not None else
                           chunk_probabilities(h, cast, y, cap, temperature))
            dz = p.mul_(-g[:, None])                                              # (A, V)
            dz[torch.arange(len(y), device=y.device), y] += g
            dz = dz.mul_(slope).to(dtype)
            grad_hidden[start * few:start * few + len(h)] = dz @ cast
            if grad_head is not None and grad_head.dtype == dtype:
                grad_head.addmm_(dz.T, h)                           # in place: no second matrix of its size
            elif grad_head is not None:
                grad_head += dz.T @ h
        return grad_hidden, grad_head, None, None, None, None


def token_logprobs(model: Transformer, tokens: Tensor, mask: Tensor, segments: Tensor | None = None,
                   temperature: float = 1.0) -> Tensor:
    """Return log p(tokens[b, t] | tokens[b, :t]) at temperature, where `mask` is true, and 0 elsewhere.

    Rows are right padded; causality keeps padding out, so ids never decide what is padding. With `segments`
    (B, T), negative in padding, a row holds several dialogues, and each has only its own tokens as context.

    Shapes: tokens (B, T), mask (B, T) -> (B, T). The first token of a dialogue has no context: its mask must
    be false.
    """
    assert tokens.shape == mask.shape, f"tokens {tuple(tokens.shape)} and mask {tuple(mask.shape)} differ"
    mask = mask.bool()
    starts = segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0 if segments is not None else 0
    assert not (mask[:, 0].any() or (mask & starts).any()), "a first token has no context to be scored in"
    if segments is not None and ((segments == segments[:, :1]) | (segments < 0)).all():
        segments = None                     # a dialogue a row: causal attention does without a (T, T) mask
    hidden = model(tokens, segments=segments)[:, :-1][mask[:, 1:]]                # (A, D)
    chosen = ChosenLogprobs.apply(hidden, model.lm_head.weight, tokens[:, 1:][mask[:, 1:]], model.softcap,
                                  temperature, model.compute_dtype)
    return torch.zeros(tokens.shape, device=tokens.device, dtype=chosen.dtype).masked_scatter(mask, chosen)


def main() -> None:
    """Compare values and gradients with those of all logits at once, under a vocabulary of 100,000."""
    V, model = 100_000, Transformer(tiny_config(vocab_size=100_000))
    tokens = torch.randint(V, (4, 100), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(100) % 2 == 1).expand(4, -1)
    whole = model.logits(model(tokens))[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    values = whole[mask[:, 1:]], token_logprobs(model, tokens, mask)[mask]
    gradients = [torch.autograd.grad(logprobs.sum(), model.lm_head.weight)[0] for logprobs in values]
    print(f"{tokens.numel() * V:,} logits at once; chunks of {LOGITS // V} of {mask.sum()} positions, "
          f"{LOGITS // V * V:,} logits")
    for name, (ours, theirs) in (("log-probabilities", values), ("gradients of the head", gradients)):
        print(f"{name}: largest difference {(ours - theirs).abs().max():.1e} of {theirs.abs().max():.1e}")


if __name__ == "__main__":
    main()
