r"""Group relative policy optimisation (GRPO, arXiv 2402.03300) on whole dialogues: pure tensors.

G dialogues about the same problem form a group. An advantage is a dialogue's reward within its group, shared
by all of its actions; the loss is PPO's clipped surrogate over the actions of every turn, and the user's
tokens have no part in it:

    A_i   = (r_i - mean(r)) / std(r)                                                       advantages
    rho_t = exp(log pi(a_t | context) - log pi_old(a_t | context))                         importance ratio
    loss  = -(1 / actions) sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)   policy_loss
            + kl_coef KL

Departures from the paper's equation 3, all of them common since:
1. One normaliser for the whole optimiser step, its number of actions, instead of each dialogue's own length:
   every action weighs the same, and the size of micro-batches cannot change the gradient.
2. Equal rewards give an advantage of exactly 0: such a group carries no gradient.
3. The KL penalty is off by default (kl_coef 0); its estimate k3 is reported at every step all the same.

Run `python grpo.py` to see a group's advantages and a policy of two tokens learn.

Shapes: P prompts, G group size, B = P*G dialogues, T tokens, right padded; index t speaks about token t.
"""

import torch
from torch import Tensor

from config import Config, command
from logprobs import micro_batches, token_logprobs
from model import Transformer


def agree(rewards: Tensor) -> Tensor:
    """Return (P, 1): whether all rewards of a group are equal, failed dialogues aside; it teaches nothing."""
    smallest, largest = rewards.nan_to_num(torch.inf).amin(1), rewards.nan_to_num(-torch.inf).amax(1)
    return (smallest >= largest)[:, None]


def advantages(rewards: Tensor, divide_by_std: bool = True) -> Tensor:
    """Return (P, G) advantages: (r - mean) / std of each group, the std with ddof 0; exactly 0 where all
    rewards agree.

    advantages([[1, 0, 0, 1]]) is [[1, -1, -1, 1]]: mean 0.5, std 0.5. A failed dialogue has the reward NaN:
    it is left out of mean and std, and its advantage is 0.

    Raises: ValueError for groups of one, which have nothing to compare with.
    """
    assert rewards.dim() == 2, f"rewards must be (P, G), got {tuple(rewards.shape)}"
    if rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least 2 dialogues, got {rewards.shape[1]}")
    valid = ~rewards.isnan()
    n = valid.sum(1, keepdim=True).clamp(min=1)
    total = torch.where(valid, rewards, 0.0).sum(1, keepdim=True)
    centred = torch.where(valid, rewards - total / n, 0.0)
    if divide_by_std:
        std = (centred.square().sum(1, keepdim=True) / n).sqrt()
        centred = centred / torch.where(agree(rewards), 1.0, std)
    return torch.where(agree(rewards), 0.0, centred)


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, action_mask: Tensor,
                normaliser: float, clip_eps: float = 0.2, ref_logprobs: Tensor | None = None,
                kl_coef: float = 0.0) -> tuple[Tensor, dict]:
    """Return the loss of some dialogues and, for the log, the largest ratio and sums over their actions.

    `normaliser` is the number of actions in the whole optimiser step: micro-batches' losses add up to its.

    Paper: GRPO, equation 3, with k3 (equation 4) as KL estimate: exp(d) - d - 1 with d = log ref - log pi.
    Shapes: logprobs, old_logprobs, ref_logprobs, action_mask (B, T); advantages (B,).
    """
    assert logprobs.shape == old_logprobs.shape == action_mask.shape, \
        f"not one (B, T): {tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, {tuple(action_mask.shape)}"
    assert advantages.shape == logprobs.shape[:1], f"advantages must be (B,), got {tuple(advantages.shape)}"
    log_ratio = torch.where(action_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20)
    ratio = log_ratio.exp()
    A = advantages[:, None]                                                # a dialogue's, for all its actions
    unclipped, clipped = ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A
    per_token = -torch.minimum(unclipped, clipped)
    stats = {"ratio_max": ratio.detach().masked_fill(~action_mask, 0.0).max(),
             "clipped": ((clipped < unclipped) & action_mask).sum()}
    if ref_logprobs is not None:
        d = torch.where(action_mask, ref_logprobs - logprobs, 0.0).clamp(-20, 20)
        kl = d.exp() - d - 1
        per_token = per_token + kl_coef * kl
        stats["kl"] = (kl.detach() * action_mask).sum()
    return (per_token * action_mask).sum() / normaliser, stats


def update(policy: Transformer, optimiser: torch.optim.Optimizer, tokens: Tensor, action_mask: Tensor,
           old_logprobs: Tensor, advantages: Tensor, *, reference: Transformer | None = None,
           clip_eps: float = 0.2, kl_coef: float = 0.0, max_grad_norm: float = 1.0,
           token_budget: int = Config.token_budget) -> dict:
    """Take one optimiser step on B dialogues and return its statistics.

    They go through the model longest first, `token_budget` tokens at a time. If `reference` is given, the
    KL to it is reported; it enters the loss by `kl_coef`.

    Raises: FloatingPointError if the loss or the gradient is not finite; nothing is updated then.
    """
    places = torch.arange(1, action_mask.shape[1] + 1, device=tokens.device)
    lengths = (action_mask * places).amax(1).clamp(min=1)                  # up to each dialogue's last action
    actions = max(1, int(action_mask.sum()))
    total = {"loss": 0.0, "ratio_max": 0.0, "clipped": 0.0, "kl": 0.0}
    optimiser.zero_grad(set_to_none=True)
    for rows in micro_batches(lengths, token_budget):
        T = int(lengths[rows[0]])
        inputs, mask, old = tokens[rows, :T], action_mask[rows, :T], old_logprobs[rows, :T]
        with torch.no_grad():
            ref = token_logprobs(reference, inputs, mask) if reference is not None else None
        logprobs = token_logprobs(policy, inputs, mask)
        loss, stats = policy_loss(logprobs, old, advantages[rows], mask, actions, clip_eps, ref, kl_coef)
        loss.backward()
        total["loss"] += float(loss.detach())
        total["ratio_max"] = max(total["ratio_max"], float(stats.pop("ratio_max")))
        for name, value in stats.items():
            total[name] += float(value)
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm))
    if not (abs(total["loss"]) < float("inf") and norm < float("inf")):
        raise FloatingPointError(f"loss {total['loss']}, gradient norm {norm}")
    optimiser.step()
    return {"loss": total["loss"], "ratio_max": total["ratio_max"], "clip_frac": total["clipped"] / actions,
            "kl": total["kl"] / actions, "grad_norm": norm}


@command
def main() -> None:
    """Two groups by hand, then a policy that finds out which of two tokens is rewarded."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    print(f"rewards {rewards.tolist()}\nadvantages {advantages(rewards).tolist()}")
    logits = torch.zeros(2, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        probabilities = logits.softmax(-1)
        tokens = torch.multinomial(probabilities.detach(), 8, replacement=True, generator=generator)
        logprobs = probabilities.log()[tokens][:, None]                            # (B, T) = (8, 1)
        A = advantages((tokens == 1).float()[None])[0]
        loss, _ = policy_loss(logprobs, logprobs.detach(), A, torch.ones_like(logprobs).bool(), normaliser=8)
        gradient, = torch.autograd.grad(loss, logits)
        logits = (logits - 2 * gradient).detach().requires_grad_()
        print(f"step {step}: {int(tokens.sum())} of 8 rewarded, p(rewarded token) "
              f"{probabilities[1]:.2f} -> {logits.softmax(-1)[1]:.2f}")


if __name__ == "__main__":
    main()
