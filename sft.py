"""Supervised fine-tuning: the loss of the method's first half, and of every warm start.

The negative log-likelihood of some tokens of a dialogue given all before them, -1/n sum_t log p(y_t | y_<t):
the assistant's when a policy is warm-started, the user's when a simulator is calibrated. All else is context.

Run `python sft.py` to see a small model learn a dialogue.
"""

import math
import random

import torch
from tqdm import tqdm

from chat import tiny_chat
from config import Config, UserError, command
from logprobs import Example, packed_batches, token_logprobs
from model import Transformer, autocast, tiny_config, trainable
from sampling import draw_key


@torch.no_grad()
def examples_nll(model: Transformer, examples: list[Example],
                 token_budget: int = Config.token_budget) -> list[tuple[float, float]]:
    """Return for every example the negative log-likelihood of its masked tokens, in nats, and how many."""
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples]
    totals = torch.zeros(2, len(examples), dtype=torch.float64)
    for tokens, mask, segments in packed_batches(examples, token_budget, model.device):
        nll, real = -token_logprobs(model, tokens, mask, segments), segments >= 0
        for total, found in zip(totals, (nll, mask)):
            total.index_add_(0, segments[real].cpu(), found[real].double().cpu())
    return [(nll, count) for nll, count in totals.T.tolist()]


def mean_nll(model: Transformer, examples: list[Example], token_budget: int = Config.token_budget) -> float:
    """Return the negative log-likelihood per masked token, infinite if there is none."""
    nlls, counts = zip(*examples_nll(model, examples, token_budget)) if examples else ((), ())
    return sum(nlls) / sum(counts) if sum(counts) else math.inf


def sft(model: Transformer, examples: list[Example], *, steps: int, batch: int, lr: float, seed: int,
        token_budget: int = Config.token_budget, precision: str = "fp32", validation: list[Example] = (),
        phase: str = "sft") -> list[float]:
    """Fine-tune on the masked tokens and return the loss of every step, in nats per token.

    One normaliser per step, its number of masked tokens, so the split into micro-batches of at most
    `token_budget` tokens does not change the gradient. The learning rate warms up over 20 steps and decays to
    a tenth by a cosine. `phase` names the progress bar and keys the order of the examples. With `validation`
    examples, their loss is measured every tenth of the steps; training stops when it has not reached a new
    minimum three times in a row, and the weights of the minimum are restored.

    Raises: UserError if there is nothing to learn, or if loss or gradient is not finite.
    """
    room = model.config.max_position_embeddings
    examples = [(ids[:room], mask[:room]) for ids, mask in examples if any(mask[:room])]
    if not examples:
        raise UserError(f"{phase}: no dialogue has a token to learn within {room} tokens")
    optimiser = torch.optim.AdamW(trainable(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.01,
                                  fused=True)
    rng, order, losses = random.Random(draw_key(seed, "order", phase)), [], []
    best = [parameter.detach().clone() for parameter in trainable(model)] if validation else []
    lowest, worse = mean_nll(model, validation, token_budget), 0
    for step in tqdm(range(steps), desc=phase, disable=None, leave=False):
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
            raise UserError(f"{phase}: loss {total}, gradient norm {norm} at step {step + 1}; "
                            "try a lower learning rate")
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


@command
def main() -> None:
    chat = tiny_chat()
    example = chat.render([{"role": "user", "content": "how many apples?"},
                           {"role": "assistant", "content": "7 + 5 = 12. #### 12"}])
    losses = sft(Transformer(tiny_config(chat.vocab_size)), [example], steps=100, batch=1, lr=3e-3, seed=0)
    for step in range(0, 100, 20):
        print(f"step {step + 1:3d}: {losses[step]:.3f} nats per token")


if __name__ == "__main__":
    main()
