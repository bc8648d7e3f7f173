r"""Log-probabilities of tokens, in memory that does not grow with tokens times vocabulary.

Logits of all tokens at once are what runs out of memory first: for 16 dialogues of 2,000 tokens and a
vocabulary of 152,000 they take 19 GB. Two decisions keep them small:

1. Only the positions that are asked for go through the head: a dialogue's user tokens cost no logits.
2. They go through it chunk by chunk, and the backward pass computes each chunk's logits again. All it needs
   of them are the probabilities p, the softmax of the logits z:

       log p_y = z_y - log sum_v exp z_v          d log p_y / dz_v = [v = y] - p_v

`token_logprobs` is the only place where predictions are shifted by one. Everywhere else index t speaks about
token t. Below it stands how dialogues become rows of a forward pass: padded in the update, packed one after
the other in fine-tuning.

Run `python logprobs.py` to compare with all logits at once.

Shapes: B rows, T tokens, R of them asked for, V vocabulary, D width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model import Transformer, tiny_config, wide

Example = tuple[list[int], list[int]]           # ids and mask of a dialogue, as `Chat.render` returns them
LOGITS = 2 ** 24                    # most logits per chunk: 64 MiB in fp32, or 110 positions at V = 152,000


def chunk_probabilities(hidden: Tensor, head: Tensor, chosen: Tensor, cap: float | None,
                        temperature: float) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return all probabilities (R, V) in fp32 at least, the log-probabilities (R,) of the `chosen` tokens and
    the derivative of the logits with respect to the head's scores.

    The logit of a score s is s / temperature or, with `cap`, cap tanh(s / cap) / temperature, which is
    Gemma's final_logit_softcapping.
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
    """The log-probability (R,) of one token after every hidden state (R, D), never with all (R, V) logits.

    Matrices multiply in `dtype`; what follows is in fp32 at least, and sums over chunks are in the head's own
    type. `backward` can run once: it overwrites what `forward` kept.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, chosen: Tensor, cap: float | None, temperature: float,
                dtype: torch.dtype) -> Tensor:
        few, cast, logprobs = max(1, LOGITS // len(head)), head.to(dtype), []
        for h, y in zip(hidden.split(few), chosen.split(few)):
            p, logprob, _ = chunk_probabilities(h.to(dtype), cast, y, cap, temperature)
            logprobs.append(logprob)
        alone = len(logprobs) == 1 and not cap           # a single chunk is kept instead of computed again
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
        for i, (h, y, g) in enumerate(zip(hidden.split(few), chosen.split(few), grad.split(few))):
            h = h.to(dtype)
            p, _, slope = ((kept, None, 1 / temperature) if kept is not None else
                           chunk_probabilities(h, cast, y, cap, temperature))
            dz = p.mul_(-g[:, None])                                              # (R, V)
            dz[torch.arange(len(y), device=y.device), y] += g
            dz = dz.mul_(slope).to(dtype)
            grad_hidden[i * few:i * few + len(h)] = dz @ cast
            if grad_head is not None and grad_head.dtype == dtype:
                grad_head.addmm_(dz.T, h)                           # in place: no second matrix of its size
            elif grad_head is not None:
                grad_head += dz.T @ h
        return grad_hidden, grad_head, None, None, None, None


def token_logprobs(model: Transformer, tokens: Tensor, mask: Tensor, segments: Tensor | None = None,
                   temperature: float = 1.0) -> Tensor:
    """Return log p(tokens[b, t] | tokens[b, :t]) at temperature where `mask` is true, and 0 elsewhere.

    Rows are padded on the right, where no earlier token sees the padding, so any id may serve as padding.
    With `segments` (B, T), negative in padding, a row holds several dialogues, and each token has only those
    of its own dialogue as context. The first token of a dialogue has none: its mask must be false.

    Shapes: tokens (B, T), mask (B, T) -> (B, T).
    """
    assert tokens.shape == mask.shape, f"tokens {tuple(tokens.shape)} and mask {tuple(mask.shape)} differ"
    mask = mask.bool()
    starts = segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0 if segments is not None else 0
    assert not (mask[:, 0].any() or (mask & starts).any()), "a first token has no context to be scored in"
    if segments is not None and ((segments == segments[:, :1]) | (segments < 0)).all():
        segments = None              # one dialogue per row: causal attention needs no (T, T) mask for that
    hidden = model(tokens, segments=segments)[:, :-1][mask[:, 1:]]                # (R, D)
    chosen = ChosenLogprobs.apply(hidden, model.lm_head.weight, tokens[:, 1:][mask[:, 1:]], model.softcap,
                                  temperature, model.compute_dtype)
    return torch.zeros(tokens.shape, device=tokens.device, dtype=chosen.dtype).masked_scatter(mask, chosen)


# Rows of a forward pass -------------------------------------------------------------------------------------

def micro_batches(lengths: Tensor, token_budget: int) -> list[Tensor]:
    """Return the indices of B dialogues in parts, longest dialogues first.

    A part, padded to its longest dialogue, has at most `token_budget` tokens, or it is a single dialogue.
    """
    order, parts = lengths.argsort(descending=True), []
    while len(order):
        few = max(1, token_budget // int(lengths[order[0]]))
        parts.append(order[:few])
        order = order[few:]
    return parts


def pack(lengths: list[int], token_budget: int) -> list[list[list[int]]]:
    """Return micro-batches of rows of example indices, each example in the first row with room for it.

    A row is as long as the longest example of its micro-batch, and a micro-batch has as many rows as the
    budget allows, at least one. pack([2, 5, 3, 4, 1], 10) is [[[1], [3, 4]], [[2], [0]]]: two rows of five
    tokens, then two of three.
    """
    left, batches = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
    while left:
        longest = lengths[left[0]]
        rows, used, later = [], [], []
        for i in left:
            fits = next((r for r, n in enumerate(used) if n + lengths[i] <= longest), None)
            if fits is None and (not rows or (len(rows) + 1) * longest <= token_budget):
                fits = len(rows)
                rows.append([])
                used.append(0)
            if fits is None:
                later.append(i)
            else:
                rows[fits].append(i)
                used[fits] += lengths[i]
        batches.append(rows)
        left = later
    return batches


def packed_batches(examples: list[Example], token_budget: int, device) -> Iterator[tuple[Tensor, ...]]:
    """Yield tokens, mask and segments of every micro-batch, (B, T) each: the segment of a token is the index
    of its example, and -1 at the end of rows that are not full.
    """
    for rows in pack([len(ids) for ids, _ in examples], token_budget):
        T = max(sum(len(examples[i][0]) for i in row) for row in rows)
        padded = []
        for row in rows:
            ids, mask = ([value for i in row for value in examples[i][part]] for part in (0, 1))
            segments, missing = [i for i in row for _ in examples[i][0]], T - len(ids)
            padded.append((ids + [0] * missing, mask + [0] * missing, segments + [-1] * missing))
        tokens, mask, segments = (torch.tensor(values, device=device) for values in zip(*padded))
        yield tokens, mask.bool(), segments


def main() -> None:
    """Compare values and gradients with those of all logits at once, for a vocabulary of 100,000."""
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
