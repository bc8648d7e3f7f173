"""Supervised fine-tuning: the loss of the method's first half, and of every warm start.

The negative log-likelihood of some tokens of a dialogue given all before them, -1/n sum_t log p(y_t | y_<t):
the assistant's when a policy is warm-started, the user's when a simulator is calibrated. What the others said
is context.

Run `python sft.py` to see a small model learn one dialogue.
"""

import math
import random

import torch
from tqdm import tqdm

from chat import tiny_chat
from logprobs import token_logprobs
from lora import trainable
from model import Transformer, autocast, tiny_config

Example = tuple[list[int], list[int]]           # ids and mask of a dialogue, as `Chat.render` returns them
TOKENS = 8192                                   # padding included, that are scored together


def pad_examples(examples: list[Example], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, (B, T) each, padded on the right."""
    T = max(len(ids) for ids, _ in examples)
    tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in examples], device=device)
    return tokens, torch.tensor([mask + [0] * (T - len(mask)) for _, mask in examples], device=device).bool()


@torch.no_grad()
def examples_nll(model: Transformer, examples: list[Example], batch: int) -> list[tuple[float, float]]:
    """Return for every example the negative log-likelihood of its masked tokens, in nats, and their number.

    At most `batch` examples go through the model together, fewer if they are long.
    """
    room, values, i = model.config.max_position_embeddings, [], 0
    while i < len(examples):
        rows = batch
        while rows > 1 and rows * max(len(ids) for ids, _ in examples[i:i + rows]) > TOKENS:
            rows -= 1
        tokens, mask = pad_examples([(ids[:room], m[:room]) for ids, m in examples[i:i + rows]], model.device)
        nll = -token_logprobs(model, tokens, mask).sum(1)
        values += zip(nll.tolist(), mask.sum(1).tolist())
        i += rows
    return values


def mean_nll(model: Transformer, examples: list[Example], batch: int) -> float:
    """Return the negative log-likelihood a masked token, infinite if there is none."""
    nlls, counts = zip(*examples_nll(model, examples, batch)) if examples else ((), ())
    return sum(nlls) / sum(counts) if sum(counts) else math.inf


def sft(model: Transformer, examples: list[Example], *, steps: int, batch: int, lr: float, seed: int,
        micro_batch: int = 16, precision: str = "fp32", validation: list[Example] = (), title: str = "sft"
        ) -> list[float]:
    """Fine-tune on the masked tokens and return the loss of every step, in nats a token.

    One normaliser a step, its number of masked tokens, so the split into length-sorted micro-batches, which
    spares padding, does not change the gradient. The learning rate warms up over 20 steps and decays to a
    tenth by a cosine. With `validation` examples, their loss is measured every tenth of the steps; training
    stops when it has not reached a new minimum three times in a row, and the weights of the minimum are
    restored.

    Raises: FloatingPointError if loss or gradient is not finite; ValueError if there is nothing to learn.
    """
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples if any(mask[:room])]
    if not examples:
        raise ValueError(f"{title}: no dialogue has a token to learn within {room} tokens")
    optimiser = torch.optim.AdamW(trainable(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    rng, order, losses = random.Random(seed), [], []
    best = [parameter.detach().clone() for parameter in trainable(model)] if validation else []
    lowest, worse = mean_nll(model, validation, micro_batch), 0
    for step in tqdm(range(steps), desc=title, disable=None, leave=False):
        while len(order) < batch:
            order += rng.sample(range(len(examples)), len(examples))
        rows, order = order[:batch], order[batch:]
        rows.sort(key=lambda row: len(examples[row][0]))
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 20, decay)
        optimiser.zero_grad(set_to_none=True)
        normaliser, total = sum(sum(examples[row][1]) for row in rows), 0.0
        for i in range(0, batch, micro_batch):
            tokens, mask = pad_examples([examples[row] for row in rows[i:i + micro_batch]], model.device)
            with autocast(model.device, precision):
                loss = -token_logprobs(model, tokens, mask).sum() / normaliser
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(trainable(model), 1.0))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise FloatingPointError(f"{title}: loss {total}, gradient norm {norm} at step {step + 1}")
        optimiser.step()
        losses.append(total)
        if validation and (step + 1) % max(1, steps // 10) == 0:
            nll, worse = mean_nll(model, validation, micro_batch), worse + 1
            if nll < lowest:
                lowest, best, worse = nll, [parameter.detach().clone() for parameter in trainable(model)], 0
            if worse == 3:
                break
    for parameter, value in zip(trainable(model), best):
        parameter.data.copy_(value)
    return losses


def main() -> None:
    chat = tiny_chat()
    example = chat.render([{"role": "user", "content": "how many apples?"},
                           {"role": "assistant", "content": "7 + 5 = 12. #### 12"}])
    losses = sft(Transformer(tiny_config(chat.vocab_size)), [example], steps=100, batch=1, lr=3e-3, seed=0)
    for step in range(0, 100, 20):
        print(f"step {step + 1:3d}: {losses[step]:.3f} nats a token")


if __name__ == "__main__":
    main()
