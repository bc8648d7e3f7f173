"""How fast it is, beside the usual way to do the same, in one run and on the same weights.

    rollout      whole dialogues, against Hugging Face's `generate`, called on the whole history at every turn
    update       one GRPO step, against logits of all positions at once, in one batch and in micro-batches
    warm start   fine-tuning on packed rows, against rows sorted by length and padded, with all logits
    sampler      token and log-probability, against softmax, multinomial and log_softmax

Theirs and ours alternate, and the median of each counts, since machines are noisy: look at ratios. Beside
them stands the physical floor of this machine (floor.py). `generate` uses its defaults but for top-k and
top-p, and returns no log-probabilities; ours do. Peak memory is that of a fresh process. Weights are random,
in the shape of the named model.

Run `python -m extras.bench` (25 minutes on two cores; `--only sampler` for a part). On a CPU it writes
assets/bench.csv.
"""

import argparse
import csv
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from chat import tiny_chat
from config import Parser, UserError, command, number
from engine import Engine
from extras.floor import DTYPES, bandwidth, linear_weights, multiplications, rollout_floor, seconds
from extras.memory import MODELS
from grpo import update
from logprobs import Example, packed_batches, token_logprobs
from model import Transformer, autocast, tiny_config
from sampling import sample, uniform

logging.set_verbosity_error()                   # `generate` warns at every call
ROOT = Path(__file__).parent.parent
CSV = ROOT / "assets" / "bench.csv"
COLUMNS = ("what", "unit", "theirs", "ours", "ratio", "floor")
TOKENS, ACTIONS, DIALOGUES = 160, 80, 16        # of the update
BUDGET = 320                                    # its tokens per forward and backward pass
# of the rollouts: B, H, most tokens per reply, precision, and the share of the vocabulary that ends a reply
TINY_SIZES = [(256, 5, 32, "fp32", 0.0), (256, 5, 48, "fp32", 0.1)]
SMOL_SIZES = [(B, 3, 32, precision, 0.0) for B in (16, 64) for precision in DTYPES]


def alternate(theirs: Callable, ours: Callable, repeats: int, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of both, called in turn."""
    times = [(seconds(theirs, device), seconds(ours, device)) for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*times))


# Rollout ----------------------------------------------------------------------------------------------------

def random_texts(config, B: int, H: int, opening: tuple, message: tuple) -> tuple[list, list]:
    """Return random openings (B,) and users' messages (H, B) as ids, their lengths between given bounds."""
    generator = torch.Generator().manual_seed(0)

    def ids(shortest: int, longest: int) -> list[int]:
        n = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return torch.randint(config.vocab_size, (n,), generator=generator).tolist()

    return [ids(*opening) for _ in range(B)], [[ids(*message) for _ in range(B)] for _ in range(H)]


@torch.no_grad()
def our_dialogues(model: Transformer, openings: list, messages: list, new: int, precision: str,
                  stops: list[int]) -> int:
    """Let our engine sample at most `new` tokens per reply; return how many it sampled."""
    with autocast(model.device, precision):
        engine = Engine(model, SimpleNamespace(stop_ids=stops), openings, list(range(len(openings))), new)
        for turn in messages:
            engine.reply()
            for row, ids in enumerate(turn):
                engine.feed(row, ids)
    return sum(map(sum, engine.action_mask))


@torch.no_grad()
def their_dialogues(model, openings: list, messages: list, new: int, stops: list[int]) -> int:
    """Let `generate` do the same, which reads whole dialogues, padded on the left, again at every turn."""
    dialogues, sampled = [list(ids) for ids in openings], 0
    for turn in messages:
        T = max(map(len, dialogues))
        tokens = torch.tensor([[0] * (T - len(ids)) + ids for ids in dialogues], device=model.device)
        mask = torch.tensor([[0] * (T - len(ids)) + [1] * len(ids) for ids in dialogues], device=model.device)
        out = model.generate(input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
                             top_p=1.0, repetition_penalty=1.0, max_new_tokens=new, pad_token_id=0,
                             eos_token_id=stops or None)
        for row, reply in enumerate(out[:, T:].tolist()):
            end = next((t + 1 for t, token in enumerate(reply) if token in stops), len(reply))
            dialogues[row] += reply[:end] + turn[row]
            sampled += end
    return sampled


def bench_rollout(name: str, config, sizes: list[tuple], opening: tuple, message: tuple, repeats: int,
                  device: torch.device) -> Iterator[dict]:
    """Measure rollouts of some sizes; openings and messages have random lengths."""
    model = Transformer(config).to(device).eval()
    model.cuda_graphs = device.type == "cuda"
    for B, H, new, precision, share in sizes:
        theirs = AutoModelForCausalLM.from_config(config).to(device).eval()
        theirs.load_state_dict(model.state_dict())
        theirs.to(DTYPES[precision])
        openings, messages = random_texts(config, B, H, opening, message)
        stops, sampled = list(range(1, 1 + int(share * config.vocab_size))), {"theirs": [], "ours": []}
        times = alternate(
            lambda: sampled["theirs"].append(their_dialogues(theirs, openings, messages, new, stops)),
            lambda: sampled["ours"].append(our_dialogues(model, openings, messages, new, precision, stops)),
            repeats, device)
        rates = [statistics.mean(counts) / t for counts, t in zip(sampled.values(), times)]
        floor = rollout_floor(model, openings, messages, new, precision, bandwidth(device),
                              multiplications(DTYPES[precision], device))
        length = f"{new} tokens" if not share else f"1 to {new} tokens"
        yield line(f"rollout, {name}, B = {B}, {precision}, {length}", "sampled tokens/s", *rates,
                   math.nan if share else B * H * new / floor, higher=True)


# Update -----------------------------------------------------------------------------------------------------

def update_batch(vocabulary: int, device) -> tuple[Tensor, ...]:
    """Return tokens, action mask, recorded log-probabilities and advantages of DIALOGUES, half of whose
    tokens are actions.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (DIALOGUES, TOKENS), generator=generator).to(device)
    action_mask = (torch.arange(TOKENS, device=device) // 20 % 2 == 1).expand(DIALOGUES, -1)
    return (tokens, action_mask, torch.full(tokens.shape, -11.0, device=device),
            torch.randn(DIALOGUES, generator=generator).to(device))


def plain_update(model: Transformer, optimiser, tokens: Tensor, action_mask: Tensor, old_logprobs: Tensor,
                 advantages: Tensor, micro_batch: int) -> None:
    """Take the same step with the logits of all positions, `micro_batch` dialogues at a time."""
    optimiser.zero_grad(set_to_none=True)
    for rows in torch.arange(len(tokens), device=tokens.device).split(micro_batch):
        ids, mask, advantage = tokens[rows], action_mask[rows, 1:], advantages[rows, None]
        logprobs = model.logits(model(ids))[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - old_logprobs[rows, 1:]).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-surrogate[mask].sum() / action_mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def one_update(kind: str, model: Transformer, optimiser, batch: tuple, precision: str) -> None:
    """Take a step as `kind` says: ours, plain in one batch, or plain in micro-batches of our size."""
    with autocast(model.device, precision):
        if kind == "ours":
            update(model, optimiser, *batch, token_budget=BUDGET)
        else:
            plain_update(model, optimiser, *batch, DIALOGUES if kind == "plain" else BUDGET // TOKENS)


def adamw(model: Transformer) -> torch.optim.Optimizer:
    """Return an optimiser that has its state already, from a step at learning rate 0."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    model(torch.zeros(1, 2, dtype=torch.long, device=model.device)).sum().backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return optimiser


def peak_memory(kind: str, precision: str) -> float:
    """Return the bytes that an update takes above weights and optimiser state, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "extras.bench", "--peak", kind, precision], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    return float(done.stdout)


def resident(name: str) -> int:
    """Return VmRSS, the bytes that this process holds, or VmHWM, the most it has held. Linux only."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def print_peak(kind: str, precision: str) -> None:
    """Take one step and print the most bytes that it held above what was held before it."""
    model = Transformer(MODELS["SmolLM2-135M"])
    optimiser, batch = adamw(model), update_batch(model.config.vocab_size, model.device)
    before = resident("VmRSS")
    one_update(kind, model, optimiser, batch, precision)
    print(resident("VmHWM") - before)


def bench_update(repeats: int, device: torch.device) -> Iterator[dict]:
    """Measure a step on DIALOGUES of TOKENS, half of them actions: seconds, gradients and peak memory."""
    model = Transformer(MODELS["SmolLM2-135M"]).to(device)
    optimiser, batch = adamw(model), update_batch(model.config.vocab_size, device)
    blocks, head = linear_weights(model)
    for precision in DTYPES:
        gradients = []
        for kind in ("plain", "ours"):
            one_update(kind, model, optimiser, batch, precision)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
        print(f"update, {precision}: gradients differ by {difference:.0e} of their norm", flush=True)
        del gradients
        work = 6 * DIALOGUES * (TOKENS * blocks + ACTIONS * head)
        floor = work / multiplications(DTYPES[precision], device)
        for kind, name in (("plain", "one batch"), ("split", "micro-batches")):
            times = alternate(lambda: one_update(kind, model, optimiser, batch, precision),
                              lambda: one_update("ours", model, optimiser, batch, precision), repeats, device)
            yield line(f"update, {precision}, plain in {name}", "s", *times, floor)
        if device.type == "cpu" and Path("/proc/self/status").exists():
            least = 4 * sum(p.numel() for p in model.parameters()) / 1e9                  # the gradient alone
            plain, split, ours = (peak_memory(kind, precision) / 1e9 for kind in ("plain", "split", "ours"))
            yield line(f"update, {precision}, peak, plain in one batch", "GB", plain, ours, least)
            yield line(f"update, {precision}, peak, plain in micro-batches", "GB", split, ours, least)


# Warm start -------------------------------------------------------------------------------------------------

def padded_step(model: Transformer, examples: list[Example], micro_batch: int) -> None:
    """Take gradients over micro-batches of dialogues, sorted by length and padded, with all logits."""
    examples = sorted(examples, key=lambda example: len(example[0]))
    for i in range(0, len(examples), micro_batch):
        part = examples[i:i + micro_batch]
        T = max(len(ids) for ids, _ in part)
        tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in part], device=model.device)
        mask = torch.tensor([mask + [0] * (T - len(mask)) for _, mask in part], device=model.device).bool()
        logprobs = model.logits(model(tokens))[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-logprobs[mask[:, 1:]].sum()).backward()


def packed_step(model: Transformer, examples: list[Example], token_budget: int) -> None:
    """Take the same gradients over packed rows."""
    for tokens, mask, segments in packed_batches(examples, token_budget, model.device):
        (-token_logprobs(model, tokens, mask, segments).sum()).backward()


def bench_warm_start(repeats: int, device: torch.device) -> Iterator[dict]:
    """Measure 16 dialogues of 40 to 400 tokens, half of them with a loss, at most 1,600 tokens at a time."""
    model = Transformer(MODELS["SmolLM2-135M"]).to(device)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 401, (16,), generator=generator).tolist()
    examples = [(torch.randint(model.config.vocab_size, (n,), generator=generator).tolist(),
                 [t // 20 % 2 for t in range(n)]) for n in lengths]
    blocks, head = linear_weights(model)
    for precision in DTYPES:
        with autocast(device, precision):
            times = alternate(lambda: padded_step(model, examples, 4),
                              lambda: packed_step(model, examples, 1600), repeats, device)
        floor = 6 * sum(lengths) * (blocks + head / 2) / multiplications(DTYPES[precision], device)
        yield line(f"warm start, {precision}", "tokens/s", *(sum(lengths) / t for t in (*times, floor)),
                   higher=True)


# Sampler ----------------------------------------------------------------------------------------------------

def usual_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return one token per row and its log-probability, as is usually done."""
    logits = logits.float()
    tokens = torch.multinomial(logits.softmax(-1), 1)
    return tokens, logits.log_softmax(-1).gather(-1, tokens)


def bench_sampler(repeats: int, device: torch.device) -> Iterator[dict]:
    """Measure on four matrices of logits in turn, so that none of them is in a cache already."""
    for B, V, dtype in ((64, 49_152, torch.float32), (256, 151_936, torch.bfloat16)):
        matrices = [torch.randn(B, V, device=device).to(dtype) for _ in range(4)]
        u = uniform(torch.arange(B, device=device), torch.zeros(B, dtype=torch.long, device=device))
        times = alternate(lambda: [usual_sample(logits) for logits in matrices],
                          lambda: [sample(logits, u) for logits in matrices], 3 * repeats, device)
        yield line(f"sampler, {B} x {V:,}, {str(dtype)[6:]}", "ms", *(1e3 * t / 4 for t in times),
                   1e3 * matrices[0].nbytes / bandwidth(device))


# The table --------------------------------------------------------------------------------------------------

def line(what: str, unit: str, theirs: float, ours: float, floor: float, higher: bool = False) -> dict:
    """Return a line of the table; the ratio is above 1 where ours is better."""
    return {"what": what, "unit": unit, "theirs": theirs, "ours": ours,
            "ratio": ours / theirs if higher else theirs / ours, "floor": floor}


def shown(value: float) -> str:
    """Return a number with three digits, or with all that stand before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_csv(rows: list[dict]) -> None:
    """Write rows to assets/bench.csv; each replaces the row of the same name."""
    table = {}
    if CSV.exists():
        with CSV.open(newline="", encoding="utf-8") as file:
            table = {found["what"]: found for found in csv.DictReader(file)}
    for found in rows:
        table[found["what"]] = {c: f"{v:.4g}" if isinstance(v, float) else v for c, v in found.items()}
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table.values())


@command
def main() -> None:
    parts = ("sampler", "warm-start", "update", "rollout")
    parser = Parser("Measure speed and memory.")
    parser.add_argument("--only", choices=parts, help="measure one part; others keep what is recorded")
    parser.add_argument("--repeats", type=number(int, 1), default=3, help="measurements of each (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch finds none")
    if args.peak:
        print_peak(*args.peak)
        return
    device, wanted = torch.device(args.device), (args.only,) if args.only else parts
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{name}: {bandwidth(device) / 1e9:.0f} GB/s; " + ", ".join(
        f"{multiplications(dtype, device) / 1e9:,.0f} GFLOP/s in {precision}"
        for precision, dtype in DTYPES.items()), flush=True)
    smol, tiny = MODELS["SmolLM2-135M"], tiny_config(tiny_chat().vocab_size)
    benches = {"sampler": [lambda: bench_sampler(args.repeats, device)],
               "warm-start": [lambda: bench_warm_start(args.repeats, device)],
               "update": [lambda: bench_update(args.repeats, device)],
               "rollout": [lambda: bench_rollout("tiny", tiny, TINY_SIZES, (20, 40), (4, 12), args.repeats,
                                                 device),
                           lambda: bench_rollout("SmolLM2-135M", smol, SMOL_SIZES, (40, 80), (8, 24),
                                                 args.repeats, device)]}
    if device.type == "cuda":
        benches["rollout"].append(lambda: bench_rollout("Qwen2.5-0.5B", MODELS["Qwen2.5-0.5B"],
                                                        [(64, 1, 128, "bf16", 0)], (40, 80), (8, 24),
                                                        args.repeats, device))
    rows = []
    print(f"{'':50s}{'theirs':>9s}{'ours':>9s}{'floor':>9s}  {'unit':17s}{'ratio':>6s}")
    for bench in (bench for part in wanted for bench in benches[part]):
        for found in bench():
            rows.append(found)
            print("{:50s}{:>9s}{:>9s}{:>9s}  {:17s}{:6.2f}".format(
                found["what"], *(shown(found[column]) for column in ("theirs", "ours", "floor")),
                found["unit"], found["ratio"]), flush=True)
    if device.type == "cpu":
        write_csv(rows)


if __name__ == "__main__":
    main()
