"""Supervised fine-tuning: the loss of the method's first half, and of every warm start.

The negative log-likelihood of some tokens of a dialogue given all before them, -1/n sum_t log p(y_t | y_<t):
the assistant's when a policy is warm-started, the user's when a simulator is calibrated. What the others said
is context.

Dialogues are packed one after the other into rows as long as the longest, instead of padded to it: the model
computes little but real tokens, and none sees another dialogue.

Run `python sft.py` to see how dialogues are packed, and a small model learn one.
"""

import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from chat import tiny_chat
from logprobs import TOKEN_BUDGET, token_logprobs
from lora import trainable
from model import Transformer, autocast, tiny_config

Example = tuple[list[int], list[int]]           # ids and mask of a dialogue, as `Chat.render` returns them


def pack(lengths: list[int], token_budget: int) -> list[list[list[int]]]:
    """Return micro-batches of rows of example indices: every example once, the longest first, each in the
    first row that has room for it.

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
            ids, mask, segments = ([], [], [])
            for i in row:
                ids += examples[i][0]
                mask += examples[i][1]
                segments += [i] * len(examples[i][0])
            missing = T - len(ids)
            padded.append((ids + [0] * missing, mask + [0] * missing, segments + [-1] * missing))
        tokens, mask, segments = (torch.tensor(values, device=device) for values in zip(*padded))
        yield tokens, mask.bool(), segments


@torch.no_grad()
def examples_nll(model: Transformer, examples: list[Example],
                 token_budget: int = TOKEN_BUDGET) -> list[tuple[float, float]]:
    """Return for every example the negative log-likelihood of its masked tokens, in nats, and how many."""
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples]
    values = torch.zeros(2, len(examples) + 1, dtype=torch.float64)
    for tokens, mask, segments in packed_batches(examples, token_budget, model.device):
        nll, segments = -token_logprobs(model, tokens, mask, segments), segments.flatten().cpu()
        for total, found in zip(values, (nll, mask)):                             # -1, padding, is the last
            total.index_add_(0, segments % len(total), found.flatten().double().cpu())
    return [(nll, count) for nll, count in values[:, :-1].T.tolist()]


def mean_nll(model: Transformer, examples: list[Example], token_budget: int = TOKEN_BUDGET) -> float:
    """Return the negative log-likelihood a masked token, infinite if there is none."""
    nlls, counts = zip(*examples_nll(model, examples, token_budget)) if examples else ((), ())
    return sum(nlls) / sum(counts) if sum(counts) else math.inf


def sft(model: Transformer, examples: list[Example], *, steps: int, batch: int, lr: float, seed: int,
        token_budget: int = TOKEN_BUDGET, precision: str = "fp32", validation: list[Example] = (),
        title: str = "sft") -> list[float]:
    """Fine-tune on the masked tokens and return the loss of every step, in nats a token.

    One normaliser a step, its number of masked tokens, so the split into micro-batches of at most
    `token_budget` tokens does not change the gradient. The learning rate warms up over 20 steps and decays to
    a tenth by a cosine. With `validation` examples, their loss is measured every tenth of the steps; training
    stops when it has not reached a new minimum three times in a row, and the weights of the minimum are
    restored.

    Raises: FloatingPointError if loss or gradient is not finite; ValueError if there is nothing to learn.
    """
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples if any(mask[:room])]
    if not examples:
        raise ValueError(f"{title}: no dialogue has a token to learn within {room} tokens")
    optimiser = torch.optim.AdamW(trainable(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.01,
                                  fused=True)
    rng, order, losses = random.Random(seed), [], []
    best = [parameter.detach().clone() for parameter in trainable(model)] if validation else []
    lowest, worse = mean_nll(model, validation, token_budget), 0
    for step in tqdm(range(steps), desc=title, disable=None, leave=False):
        while len(order) < batch:
            order += rng.sample(range(len(examples)), len(examples))
        rows, order = order[:batch], order[batch:]
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 20, decay)
        optimiser.zero_grad(set_to_none=True)
        normaliser, total = sum(sum(examples[row][1]) for row in rows), 0.0
        for tokens, mask, segments in packed_batches([examples[row] for row in rows], token_budget,
                                                     model.device):
            with autocast(model.device, precision):
                loss = -token_logprobs(model, tokens, mask, segments).sum() / normaliser
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(trainable(model), 1.0))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise FloatingPointError(f"{title}: loss {total}, gradient norm {norm} at step {step + 1}")
        optimiser.step()
        losses.append(total)
        if validation and (step + 1) % max(1, steps // 10) == 0:
            nll, worse = mean_nll(model, validation, token_budget), worse + 1
            if nll < lowest:
                lowest, best, worse = nll, [parameter.detach().clone() for parameter in trainable(model)], 0
            if worse == 3:
                break
    for parameter, value in zip(trainable(model), best):
        parameter.data.copy_(value)
    return losses


def main() -> None:
    for rows in pack([60, 20, 45, 30, 80, 35], token_budget=160):
        print("a micro-batch with the rows", rows)
    chat = tiny_chat()
    example = chat.render([{"role": "user", "content": "how many apples?"},
                           {"role": "assistant", "content": "7 + 5 = 12. #### 12"}])
    losses = sft(Transformer(tiny_config(chat.vocab_size)), [example], steps=100, batch=1, lr=3e-3, seed=0)
    for step in range(0, 100, 20):
        print(f"step {step + 1:3d}: {losses[step]:.3f} nats a token")


if __name__ == "__main__":
    main()
