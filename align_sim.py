"""Simulator calibration: fine-tuning on human dialogues, and a report card of what it changed.

The first half of Calibrated Interactive RL. A prompted simulator does not behave like people; a policy
trained against it learns to exploit the difference. So the simulator is first fine-tuned on human dialogues,
with the loss on the user's tokens alone: the assistant's are context.

Paper: section on simulator alignment (arXiv 2605.26403).

Run `python align_sim.py` to calibrate the embedded simulator (about 4 minutes), or
`python align_sim.py --human-logs chats.jsonl --simulator DIR --out DIR` for logs and a simulator of your own.
"""

import argparse
import copy
import math
import sys
from pathlib import Path

import torch

from chat import Chat, is_embedded, tiny_chat
from logprobs import TOKEN_BUDGET
from logs import read_logs, split_logs, write_logs, write_probes
from model import Transformer, autocast, tiny_config
from report_card import print_report_card, report_card
from rollout import MAX_NEW_TOKENS
from sampling import draw_key
from sft import sft
from simulator import NAIVE_USER, human, overhelpful, simulator_messages
from tasks import Problem, generate_problems
from weights import load_speaker, save_speaker

SFT_STEPS, CALIBRATION_STEPS, SFT_BATCH, SFT_LR = 1600, 2000, 32, 3e-3         # the tiny preset's
OWN_STEPS, OWN_BATCH, OWN_LR = 100, 8, 2e-5                                    # for a simulator of one's own


def naive_simulator(chat: Chat, problems: list[Problem], *, steps: int, batch: int, lr: float, seed: int,
                    device: str = "cpu") -> tuple[Transformer, list[float]]:
    """Return a tiny simulator that was fine-tuned on over-helpful users, as prompted language models are,
    and the losses.
    """
    model = Transformer(tiny_config(vocab_size=chat.vocab_size),
                        draw_key(seed, "simulator weights")).to(device)
    examples = [chat.render(simulator_messages(log)) for log in write_logs(problems, overhelpful, seed)]
    return model, sft(model, examples, steps=steps, batch=batch, lr=lr, seed=seed, title="naive simulator")


def calibrate(simulator: Transformer, chat: Chat, logs: list[dict], *, steps: int, batch: int, lr: float,
              seed: int, token_budget: int = TOKEN_BUDGET, precision: str = "fp32",
              stop_early: bool = False) -> list[float]:
    """Fine-tune a simulator in place on what people said in `logs`; return the losses.

    Real people's dialogues are few and are soon learned by heart: with `stop_early` a sixth of them is not
    trained on but says when to stop (not the held-out ones: those are for the report card).
    """
    examples = [chat.render(simulator_messages(log)) for log in logs]
    sixth = max(1, len(logs) // 6) if stop_early and len(logs) > 1 else 0
    return sft(simulator, examples[sixth:], steps=steps, batch=batch, lr=lr, seed=seed,
               token_budget=token_budget, precision=precision, validation=examples[:sixth],
               title="calibration")


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"align_sim.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calibrate a simulator on human dialogues.",
                                     allow_abbrev=False)
    parser.add_argument("--simulator", help="naive simulator: folder, GGUF file or hub id "
                                            "(default: train a tiny over-helpful one first)")
    parser.add_argument("--human-logs", help="JSONL of human dialogues (default: the scripted human's)")
    parser.add_argument("--out", help="folder for the calibrated simulator, which must not exist "
                                      "(default: not saved)")
    parser.add_argument("--steps", type=int, help="largest number of steps (default: "
                                                  f"{CALIBRATION_STEPS} embedded, {OWN_STEPS} for another)")
    parser.add_argument("--batch", type=int, help=f"dialogues a step (default: {SFT_BATCH}, {OWN_BATCH})")
    parser.add_argument("--lr", type=float, help=f"largest learning rate (default: {SFT_LR}, {OWN_LR})")
    parser.add_argument("--token-budget", type=int, default=TOKEN_BUDGET,
                        help="tokens, padding included, of a forward and backward pass: lower it if memory "
                             f"runs out (default: {TOKEN_BUDGET})")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS,
                        help=f"tokens a reply may have on the report card (default: {MAX_NEW_TOKENS})")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                        help="bf16 multiplies matrices in bf16 (default: fp32)")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu", help="(default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    parser.error = fail
    args = parser.parse_args()
    embedded = not args.simulator or is_embedded(args.simulator)
    defaults = (CALIBRATION_STEPS, SFT_BATCH, SFT_LR) if embedded else (OWN_STEPS, OWN_BATCH, OWN_LR)
    for name, default in zip(("steps", "batch", "lr"), defaults):
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
    if min(args.steps, args.batch, args.token_budget, args.max_new_tokens) < 1 or args.seed < 0 \
            or not 0 < args.lr < math.inf:
        fail("--seed must be at least 0, --lr above 0, the other numbers at least 1")
    if args.out and Path(args.out).exists():
        fail(f"{args.out} exists: choose another --out")
    return args


def main() -> None:
    args = parse_args()
    try:
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        naive, chat = (load_speaker(args.simulator, NAIVE_USER, args.device) if args.simulator
                       else (None, tiny_chat()))
        problems = generate_problems("train", 8000, args.seed)
        validation = generate_problems("validation", 300, args.seed)
        if args.human_logs:
            logs, held_out = split_logs(read_logs(args.human_logs), args.seed)
            probes, script = [], None
        else:
            logs, held_out = write_logs(problems, human, args.seed), write_logs(validation, human, args.seed)
            probes, script = write_probes(validation, held_out, human, args.seed), human
        if naive is None:
            print(f"training a naive simulator first, {SFT_STEPS // 2} steps", flush=True)
            naive, _ = naive_simulator(chat, problems, steps=SFT_STEPS // 2, batch=SFT_BATCH, lr=SFT_LR,
                                       seed=args.seed, device=args.device)
        calibrated = copy.deepcopy(naive)
        losses = calibrate(calibrated, chat, logs, steps=args.steps, batch=args.batch, lr=args.lr,
                           seed=args.seed, token_budget=args.token_budget, precision=args.precision,
                           stop_early=script is None)
        print(f"calibrated on {len(logs)} dialogues, {len(losses)} steps: "
              f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token", flush=True)
        if args.out:
            save_speaker(Path(args.out), calibrated, chat)
        with autocast(naive.device, args.precision):
            card = report_card(held_out, {"naive": naive, "calibrated": calibrated}, chat, seed=args.seed,
                               max_new_tokens=args.max_new_tokens, probes=probes, script=script)
    except (ValueError, FloatingPointError, OSError) as error:
        fail(str(error))
    except torch.OutOfMemoryError:
        fail("out of memory: lower --token-budget")
    print_report_card(card)


if __name__ == "__main__":
    main()
