"""How fast it is, beside what one would otherwise take, in one run and on the same weights.

    rollout      whole dialogues, against Hugging Face's `generate`, which re-reads the history every turn
    update       one GRPO step, against all logits at once on one padded batch
    warm start   fine-tuning on packed rows, against padded ones with all logits
    sampler      one fused pass, against softmax, multinomial and log_softmax

Ours and theirs alternate, and the median of each counts, since machines are noisy: look at ratios. Beside
them stands the physical floor, from the memory bandwidth and the matrix multiplications a second that this
machine was measured to have. Peak memory is that of a fresh process. Weights are random, of the named
model's shape.

Run `python bench.py` (half an hour on two cores; `--only sampler` for a part), which writes assets/bench.csv.
"""

import argparse
import csv
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from chat import tiny_chat
from engine import Engine
from grpo import update
from logprobs import token_logprobs
from memory import MODELS
from model import Transformer, autocast, head_size, tiny_config
from sampling import sample, uniform
from sft import Example, packed_batches

CSV = Path(__file__).parent / "assets" / "bench.csv"
COLUMNS = ("what", "unit", "theirs", "ours", "ratio", "floor")
TOKENS, ACTIONS, DIALOGUES = 160, 80, 16        # of the update
BUDGET = 640                                    # its tokens a forward and backward pass
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def alternate(theirs: Callable, ours: Callable, repeats: int, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of both, called in turn."""
    times = [(seconds(theirs, device), seconds(ours, device)) for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*times))


# What the machine can do ------------------------------------------------------------------------------------

def bandwidth(device: torch.device) -> float:
    """Return bytes a second that can be read from memory."""
    x = torch.ones(2 ** 28 // 4, device=device)
    return x.nbytes / statistics.median(seconds(x.sum, device) for _ in range(7))


def multiplications(dtype: torch.dtype, device: torch.device) -> float:
    """Return operations a second, two a multiplication and addition, of a large matrix product."""
    n = 2048 if device.type == "cpu" else 8192
    x = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n ** 3 / statistics.median(seconds(lambda: x @ x, device) for _ in range(7))


def linear_weights(model: Transformer) -> tuple[int, int]:
    """Return the numbers in the matrices of the blocks, and in the head."""
    blocks = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    return blocks, model.lm_head.weight.numel()


# Rollout ----------------------------------------------------------------------------------------------------

def script(config, B: int, H: int, opening: tuple[int, int], message: tuple[int, int]) -> tuple[list, list]:
    """Return random openings (B,) and users' messages (H, B), ragged, as ids."""
    generator = torch.Generator().manual_seed(0)

    def ids(shortest: int, longest: int) -> list[int]:
        n = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return torch.randint(config.vocab_size, (n,), generator=generator).tolist()
    return [ids(*opening) for _ in range(B)], [[ids(*message) for _ in range(B)] for _ in range(H)]


@torch.no_grad()
def our_dialogues(model: Transformer, openings: list, messages: list, new: int, precision: str) -> None:
    with autocast(model.device, precision):
        engine = Engine(model, SimpleNamespace(stop_ids=set()), openings, list(range(len(openings))), new)
        for turn in messages:
            engine.reply()
            for row, ids in enumerate(turn):
                engine.feed(row, ids)


@torch.no_grad()
def their_dialogues(model, openings: list, messages: list, new: int) -> None:
    """Left padding, all of a dialogue read again at every turn, and no setting of the checkpoint's own."""
    dialogues = [list(ids) for ids in openings]
    for turn in messages:
        T = max(map(len, dialogues))
        tokens = torch.tensor([[0] * (T - len(ids)) + ids for ids in dialogues], device=model.device)
        mask = torch.tensor([[0] * (T - len(ids)) + [1] * len(ids) for ids in dialogues], device=model.device)
        out = model.generate(input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
                             top_p=1.0, repetition_penalty=1.0, min_new_tokens=new, max_new_tokens=new,
                             pad_token_id=0, eos_token_id=None)
        dialogues = [ids + reply + said for ids, reply, said in zip(dialogues, out[:, T:].tolist(), turn)]


def rollout_floor(model: Transformer, openings: list, messages: list, new: int, precision: str, reads: float,
                  rate: float) -> float:
    """Return the seconds that it takes at least: every token through the matrices once, and in the token loop
    weights and cache read at every token.
    """
    blocks, head = linear_weights(model)
    config, size = model.config, DTYPES[precision].itemsize
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * size      # a token
    B, total, length = len(openings), 0.0, sum(map(len, openings))
    for turn in [openings, *messages[:-1]]:
        total += 2 * blocks * sum(map(len, turn)) / rate
        length += 0 if turn is openings else sum(map(len, turn))
        for _ in range(new):
            total += max(2 * (blocks + head) * B / rate, (blocks + head) * size / reads) + length * kv / reads
            length += B
    return total


def bench_rollout(name: str, config, sizes: list[tuple], opening: tuple, message: tuple, repeats: int,
                  device: torch.device) -> list[dict]:
    model, rows = Transformer(config).to(device).eval(), []
    model.graphs = device.type == "cuda"
    for B, H, new, precision in sizes:
        theirs = AutoModelForCausalLM.from_config(config).to(device).eval()
        theirs.load_state_dict(model.state_dict())
        theirs.to(DTYPES[precision])
        openings, messages = script(config, B, H, opening, message)
        times = alternate(lambda: their_dialogues(theirs, openings, messages, new),
                          lambda: our_dialogues(model, openings, messages, new, precision), repeats, device)
        floor = rollout_floor(model, openings, messages, new, precision, bandwidth(device),
                              multiplications(DTYPES[precision], device))
        rows.append(row(f"rollout, {name}, B = {B}, {precision}", "tokens/s",
                        *(B * H * new / t for t in (*times, floor)), higher=True))
    return rows


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
                 advantages: Tensor) -> None:
    """The same step as one reads it in a tutorial: all logits, of all positions, of all dialogues."""
    optimiser.zero_grad(set_to_none=True)
    logprobs = model.logits(model(tokens))[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio, A, mask = (logprobs - old_logprobs[:, 1:]).exp(), advantages[:, None], action_mask[:, 1:]
    loss = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)[mask].sum() / mask.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def one_update(kind: str, model: Transformer, optimiser, batch: tuple, precision: str) -> None:
    with autocast(model.device, precision):
        if kind == "ours":
            update(model, optimiser, *batch, token_budget=BUDGET)
        else:
            plain_update(model, optimiser, *batch)


def adamw(model: Transformer) -> torch.optim.Optimizer:
    """Return the optimiser, its state made by a step that changes nothing."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    model(torch.zeros(1, 2, dtype=torch.long, device=model.device)).sum().backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return optimiser


def peak_memory(kind: str, precision: str) -> float:
    """Return the bytes that an update takes above weights and optimiser state, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--peak", kind, precision], capture_output=True,
                          text=True, check=True)
    return float(done.stdout)


def print_peak(kind: str, precision: str) -> None:
    """Be that process. Linux only: the memory held before is read from /proc."""
    model = Transformer(MODELS["SmolLM2-135M"])
    optimiser, batch = adamw(model), update_batch(model.config.vocab_size, model.device)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    one_update(kind, model, optimiser, batch, precision)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def bench_update(repeats: int, device: torch.device) -> list[dict]:
    model, rows = Transformer(MODELS["SmolLM2-135M"]).to(device), []
    optimiser, batch = adamw(model), update_batch(model.config.vocab_size, device)
    blocks, head = linear_weights(model)
    for precision in DTYPES:
        gradients = []
        for kind in ("plain", "ours"):
            one_update(kind, model, optimiser, batch, precision)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
        times = alternate(*(lambda kind=kind: one_update(kind, model, optimiser, batch, precision)
                            for kind in ("plain", "ours")), repeats, device)
        work = 6 * DIALOGUES * (TOKENS * blocks + ACTIONS * head)
        floor = work / multiplications(DTYPES[precision], device)
        rows.append(row(f"update, {precision}, gradients differ by {difference:.0e}", "s", *times, floor))
        if device.type == "cpu":
            peaks = [peak_memory(kind, precision) / 1e9 for kind in ("plain", "ours")]
            rows.append(row(f"update, {precision}, peak above weights and optimiser", "GB", *peaks,
                            4 * sum(p.numel() for p in model.parameters()) / 1e9))
    return rows


# Warm start -------------------------------------------------------------------------------------------------

def padded_step(model: Transformer, examples: list[Example], micro_batch: int) -> None:
    """Forward and backward over micro-batches of dialogues as they come, padded, with all logits."""
    for i in range(0, len(examples), micro_batch):
        part = examples[i:i + micro_batch]
        T = max(len(ids) for ids, _ in part)
        tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in part], device=model.device)
        mask = torch.tensor([mask + [0] * (T - len(mask)) for _, mask in part], device=model.device).bool()
        logprobs = model.logits(model(tokens))[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-logprobs[mask[:, 1:]].sum()).backward()


def packed_step(model: Transformer, examples: list[Example], token_budget: int) -> None:
    for tokens, mask, segments in packed_batches(examples, token_budget, model.device):
        (-token_logprobs(model, tokens, mask, segments).sum()).backward()


def bench_warm_start(repeats: int, device: torch.device) -> list[dict]:
    """16 dialogues of 40 to 400 tokens, four at a time or 1,600 tokens; half of them have a loss."""
    model, rows = Transformer(MODELS["SmolLM2-135M"]).to(device), []
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
        rows.append(row(f"warm start, {precision}", "tokens/s", *(sum(lengths) / t for t in (*times, floor)),
                        higher=True))
    return rows


# Sampler ----------------------------------------------------------------------------------------------------

def usual_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.multinomial(logits.softmax(-1), 1)
    return tokens, logits.log_softmax(-1).gather(-1, tokens)


def bench_sampler(repeats: int, device: torch.device) -> list[dict]:
    rows = []
    for B, V, dtype in ((64, 49_152, torch.float32), (256, 151_936, torch.bfloat16)):
        logits = torch.randn(B, V, device=device).to(dtype)
        u = uniform(torch.arange(B, device=device), torch.zeros(B, dtype=torch.long, device=device))
        times = alternate(lambda: [usual_sample(logits.float()) for _ in range(5)],
                          lambda: [sample(logits, u) for _ in range(5)], 3 * repeats, device)
        rows.append(row(f"sampler, {B} x {V:,}, {str(dtype)[6:]}", "ms",
                        *(1e3 * t / 5 for t in times), 1e3 * logits.nbytes / bandwidth(device)))
    return rows


# The table --------------------------------------------------------------------------------------------------

def row(what: str, unit: str, theirs: float, ours: float, floor: float, higher: bool = False) -> dict:
    """Return a row of the table; the ratio is above 1 where ours is better."""
    return {"what": what, "unit": unit, "theirs": theirs, "ours": ours,
            "ratio": ours / theirs if higher else theirs / ours, "floor": floor}


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parts = ("sampler", "warm-start", "update", "rollout")
    parser = argparse.ArgumentParser(description="Measure speed and memory.", allow_abbrev=False)
    parser.add_argument("--only", choices=parts, help="measure one part, and write nothing")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print_peak(*args.peak)
        return
    device, wanted = torch.device(args.device), (args.only,) if args.only else parts
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{name}: {bandwidth(device) / 1e9:.0f} GB/s; " + ", ".join(
        f"{multiplications(dtype, device) / 1e9:,.0f} GFLOP/s in {precision}"
        for precision, dtype in DTYPES.items()), flush=True)
    smol, tiny = MODELS["SmolLM2-135M"], tiny_config(tiny_chat().vocab_size)
    sizes = [(B, 3, 32, precision) for B in (16, 64) for precision in DTYPES]
    benches = {"sampler": [lambda: bench_sampler(args.repeats, device)],
               "warm-start": [lambda: bench_warm_start(args.repeats, device)],
               "update": [lambda: bench_update(args.repeats, device)],
               "rollout": [lambda: bench_rollout("tiny", tiny, [(256, 5, 32, "fp32")], (20, 40), (4, 12),
                                                 args.repeats, device),
                           lambda: bench_rollout("SmolLM2-135M", smol, sizes, (40, 80), (8, 24), args.repeats,
                                                 device)]}
    if device.type == "cuda":
        benches["rollout"].append(lambda: bench_rollout("Qwen2.5-0.5B", MODELS["Qwen2.5-0.5B"],
                                                        [(64, 1, 128, "bf16")], (40, 80), (8, 24),
                                                        args.repeats, device))
    rows = []
    print(f"{'':50s}{'theirs':>9s}{'ours':>9s}{'floor':>9s}  {'unit':10s}{'ratio':>6s}")
    for bench in (bench for part in wanted for bench in benches[part]):
        for found in bench():
            rows.append(found)
            print("{:50s}{:>9s}{:>9s}{:>9s}  {:10s}{:6.2f}".format(
                found["what"], *(shown(found[column]) for column in ("theirs", "ours", "floor")),
                found["unit"], found["ratio"]), flush=True)
    if not args.only and device.type == "cpu":
        with CSV.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({c: f"{v:.4g}" if isinstance(v, float) else v for c, v in found.items()}
                             for found in rows)


if __name__ == "__main__":
    main()
