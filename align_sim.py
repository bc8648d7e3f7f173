"""Simulator calibration: fine-tuning on human dialogues, and a report card of what it changed.

The first half of Calibrated Interactive RL. A prompted simulator does not behave like people; a policy
trained against it learns to exploit the difference. So the simulator is first fine-tuned on human dialogues,
with the loss on the user's tokens alone: the assistant's are context.

Paper: section on simulator alignment (arXiv 2605.26403).

Run `python align_sim.py` to calibrate the embedded simulator (about 4 minutes), or
`python align_sim.py --human-logs chats.jsonl --simulator DIR --out DIR` for logs and a simulator of your own.
"""

import copy
from dataclasses import replace
from pathlib import Path

from chat import Chat, tiny_chat
from config import PRESETS, Config, Parser, UserError, command, complete, is_embedded, number
from logs import make_data, write_logs
from model import Transformer, autocast, tiny_config
from report_card import print_report_card, report_card
from sampling import draw_key
from sft import sft
from simulator import simulator_messages
from tasks import Problem, Task, find_task


def naive_simulator(task: Task, chat: Chat, problems: list[Problem], *, steps: int, batch: int, lr: float,
                    seed: int, device: str = "cpu") -> tuple[Transformer, list[float]]:
    """Return a tiny simulator fine-tuned on the over-helpful user, and the losses."""
    model = Transformer(tiny_config(vocab_size=chat.vocab_size),
                        draw_key(seed, "simulator weights")).to(device)
    examples = [chat.render(simulator_messages(log))
                for log in write_logs(task, problems, "overhelpful", seed)]
    return model, sft(model, examples, steps=steps, batch=batch, lr=lr, seed=seed, phase="naive simulator")


def calibrate(simulator: Transformer, chat: Chat, logs: list[dict], *, steps: int, batch: int, lr: float,
              seed: int, token_budget: int = Config.token_budget, precision: str = "fp32",
              stop_early: bool = False) -> list[float]:
    """Fine-tune a simulator in place on what people said in `logs`; return the losses.

    Dialogues of real people are few, and a model soon learns them by heart: with `stop_early` a sixth of them
    decides when to stop and is not trained on. The held-out ones are for the report card alone.
    """
    examples = [chat.render(simulator_messages(log)) for log in logs]
    sixth = max(1, len(logs) // 6) if stop_early and len(logs) > 1 else 0
    return sft(simulator, examples[sixth:], steps=steps, batch=batch, lr=lr, seed=seed,
               token_budget=token_budget, precision=precision, validation=examples[:sixth],
               phase="calibration")


def parse_args() -> Config:
    """Read the command line; the defaults of numbers depend on whether the simulator is embedded."""
    parser = Parser("Calibrate a simulator on human dialogues.")
    parser.add_fields("task", "simulator", "human_logs", "token_budget", "device", "seed", precision="fp32")
    tiny, own = Config(), Config(**PRESETS["own"])
    for flag, name, kind in (("--steps", "calibration_steps", number(int, 1)),
                             ("--batch", "sft_batch", number(int, 1)),
                             ("--lr", "sft_lr", number(float, 1e-9)),
                             ("--max-new-tokens", "max_new_tokens", number(int, 1))):
        parser.add_argument(flag, dest=name, type=kind, metavar=flag[2:].upper(),
                            help=f"(default: {getattr(tiny, name) or 'the task decides'}; for a simulator of "
                                 f"your own {getattr(own, name)})")
    parser.add_argument("--out", default="", help="folder for the simulator, which must not exist")
    args = parser.parse_args()
    if args.out and Path(args.out).exists():
        raise UserError(f"{args.out} exists: choose another --out")
    defaults = tiny if not args.simulator or is_embedded(args.simulator) else own
    return replace(defaults, **{name: value for name, value in vars(args).items() if value is not None})


@command
def main() -> None:
    from extras.hf import load_speaker, save_speaker
    from extras.readers import read_logs
    config = parse_args()
    task = find_task(config.task)
    config = complete(config, task)
    naive, chat = (load_speaker(config.simulator, task.simulator_instruction, config.device)
                   if config.simulator else (None, tiny_chat()))
    data = make_data(task, config, [], read_logs(config.human_logs) if config.human_logs else [])
    if naive is None:
        steps = Config.sft_steps // 2
        print(f"training a naive simulator first, {steps} steps", flush=True)
        naive, _ = naive_simulator(task, chat, data.train, steps=steps, batch=Config.sft_batch,
                                   lr=Config.sft_lr, seed=config.seed, device=config.device)
    calibrated = copy.deepcopy(naive)
    losses = calibrate(calibrated, chat, data.logs, steps=config.calibration_steps, batch=config.sft_batch,
                       lr=config.sft_lr, seed=config.seed, token_budget=config.token_budget,
                       precision=config.precision, stop_early=not data.scripted)
    print(f"calibrated on {len(data.logs)} dialogues, {len(losses)} steps: "
          f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token", flush=True)
    if config.out:
        save_speaker(Path(config.out), calibrated, chat)
    with autocast(naive.device, config.precision):
        print_report_card(report_card(task, data.held_out, {"naive": naive, "calibrated": calibrated}, chat,
                                      seed=config.seed, max_new_tokens=config.max_new_tokens,
                                      probes=data.probes, scripted=data.scripted))


if __name__ == "__main__":
    main()
