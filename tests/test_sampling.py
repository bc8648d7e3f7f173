"""The sampler draws what the distribution says, whoever shares the batch."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import sampling
from sampling import BLOCK, LAST, TILE, draw_key, invert, sample, uniform

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")       # its interpreter meets nan
INF = float("inf")
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sampling import BLOCK, TILE, draw, sum_blocks
for logits in ("*fp32", "*bf16", "*fp16"):
    common = {"logits": logits, "tops": "*fp32", "sums": "*fp32", "stride": "i32", "V": "i32",
              "temperature": "fp32", "BLOCK": "constexpr"}
    own = {"u": "*fp32", "tokens": "*i64", "logprobs": "*fp32", "N": "constexpr"}
    for kernel, signature, constants in (
            (sum_blocks, common | {"TILE": "constexpr"}, {"BLOCK": BLOCK, "TILE": TILE}),
            (draw, common | own, {"BLOCK": BLOCK, "N": 2048})):
        signature = {name: signature[name] for name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        print(kernel.__name__, ".visible .entry " + kernel.__name__ in ptx)
"""


@pytest.fixture(params=("torch", "triton"))
def sampler(request):
    """Both implementations of `sample`; where there is no GPU, the Triton one in its interpreter."""
    if request.param == "torch":
        return sampling.sample_torch
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def on_device(logits, u, temperature):
        found = sampling.sample_triton(logits.to(device), u.to(device), temperature)
        return tuple(values.cpu() for values in found)
    return on_device


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chi_square(observed, expected):
    return ((observed - expected) ** 2 / expected).sum().item()


def hard_rows(vocabulary, dtype):
    """Rows: plain; half of the tokens and the first half of the blocks -inf; huge; the largest numbers."""
    logits = torch.stack([3 * normal(vocabulary, seed=vocabulary + i) for i in range(4)])
    logits[1, 1::2] = logits[1, :vocabulary // 2 // BLOCK * BLOCK] = -INF
    logits[2] *= 1e30
    logits[3] = torch.where(logits[3] > logits[3].median(), 3e38, -3e38)
    return logits.to(dtype)


@pytest.mark.parametrize("temperature", (1.0, 0.7, 1e-3, 1e-6))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("vocabulary", (2, 5, 127, 128, 129, 1000, 49_155, 151_936, 262_144))
def test_both_implementations_draw_what_the_fp64_cdf_says(sampler, vocabulary, dtype, temperature):
    """u lies in the drawn token's interval of the fp64 CDF, widened by 1e-6: where u is further from every
    boundary there is one such token, so both implementations draw it.
    """
    logits = hard_rows(vocabulary, dtype)
    logits = logits[:2] if vocabulary > 100_000 else logits.repeat(1 if vocabulary > 1000 else 3, 1)
    u = torch.rand(len(logits), generator=torch.Generator().manual_seed(vocabulary))
    u[-1] = LAST
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature
    expected, after = scaled.log_softmax(-1), scaled.softmax(-1).cumsum(-1)
    before = torch.nn.functional.pad(after[:, :-1], (1, 0))
    original = logits.clone()
    tokens, logprobs = sampler(logits, u, temperature)
    assert torch.equal(logits, original)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    at = tokens[:, None]
    assert (before.gather(-1, at)[:, 0] - 1e-6 <= u).all() and (u <= after.gather(-1, at)[:, 0] + 1e-6).all()
    assert torch.allclose(logprobs.double(), expected.gather(-1, at)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocabulary", (2, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 7))
def test_frequencies_match_probabilities(vocabulary):
    """Chi-square over at most 20 bins stays below its 1 - 1e-6 quantile, which is 66 for 19 degrees of
    freedom.
    """
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    draws = 100_000
    u = uniform(torch.full((draws,), draw_key("chi", vocabulary)), torch.arange(draws))
    tokens = torch.cat([sample(logits.expand(len(part), -1), part)[0] for part in u.split(10_000)])
    bins = torch.arange(vocabulary) * min(20, vocabulary) // vocabulary
    observed = torch.zeros(20).index_add(0, bins[tokens], torch.ones(draws))
    expected = torch.zeros(20).index_add(0, bins, logits.softmax(-1) * draws)
    assert chi_square(observed[expected > 0], expected[expected > 0]) < 66


def test_the_log_probability_is_that_of_the_drawn_token():
    logits = 3 * torch.randn(200, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.rand(200, generator=torch.Generator().manual_seed(1)),
                              temperature=0.8)
    expected = (logits / 0.8).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-12)


@pytest.mark.parametrize("vocabulary", (2, 100, 1000, 50_000))
def test_a_token_of_probability_zero_is_never_drawn(sampler, vocabulary):
    """Every other logit is -inf, or so low that it underflows, and the uniforms lie at the very ends of the
    unit interval too.
    """
    logits = normal(16, vocabulary)
    logits[:8, 1::2], logits[8:, 1::2] = -INF, -1000
    logits[0, :-2] = -INF
    u = torch.cat([torch.tensor([2.0 ** -25, LAST]).repeat(4), torch.linspace(2.0 ** -25, LAST, 8)])
    tokens, logprobs = sampler(logits, u, 1.0)
    assert (tokens % 2 == 0).all() and (tokens < vocabulary).all() and logprobs.isfinite().all()


def test_inversion_finds_the_index_and_where_u_lies_inside():
    """The example of `invert`: target 2 of 4, running sums 1, 1, 3, 4. At the start of index 2, u = 1/4, the
    empty index 1 is skipped, as are those at both ends of the second row.
    """
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]] * 2 + [[0.0, 1.0, 1.0, 0.0]] * 2)
    index, probability, inside = invert(weights, torch.tensor([0.5, 0.25, 0.0, 1.0]))
    assert index.tolist() == [2, 2, 1, 2]
    assert probability.tolist() == [0.5] * 4 and inside.tolist()[:3] == [0.5, 0.0, 0.0]


def test_huge_logits_do_not_overflow(sampler):
    logits = torch.tensor([[1e30, -1e30, 0.0], [3e38, 3e38, -3e38]])
    for temperature in (1.0, 1e-6):
        tokens, logprobs = sampler(logits, torch.tensor([0.999, 0.75]), temperature)
        assert tokens.tolist() == [0, 1]
        assert logprobs.tolist() == pytest.approx([0.0, -0.6931472])


@pytest.mark.parametrize("vocabulary", (3, BLOCK, 3 * BLOCK + 7, TILE * BLOCK + 1))
def test_a_row_of_nan_stays_in_range(sampler, vocabulary):
    """All nan, one nan, nan among -inf, and all -inf: a diverged model must not index out of range."""
    logits = normal(5, vocabulary)
    logits[0], logits[1, -1], logits[2], logits[3] = torch.nan, torch.nan, -INF, -INF
    logits[2, 1] = torch.nan
    for u in (2.0 ** -25, LAST):
        tokens, logprobs = sampler(logits, torch.full((5,), u), 0.7)
        assert ((0 <= tokens) & (tokens < vocabulary)).all()
        assert logprobs.isnan().tolist() == [True] * 4 + [False]
    tokens, logprobs = sample(logits[:1], torch.tensor([0.5]), temperature=0)
    assert 0 <= tokens.item() < vocabulary and logprobs.isnan().all()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_temperature_zero_is_greedy(dtype):
    """As it is close to zero: the log-probability is 0, in fp32 at least."""
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=dtype)
    for temperature in (0, 1e-6):
        tokens, logprobs = sample(logits, torch.tensor([0.99]), temperature)
        assert tokens.tolist() == [1] and logprobs.tolist() == [0.0]
        assert logprobs.dtype == torch.promote_types(dtype, torch.float32)


def test_rows_may_be_views(sampler):
    """Columns of a wider matrix, one row many times, a transposed matrix, and every other uniform."""
    wide, u = normal(6, 500), torch.linspace(0.01, 0.99, 12)[::2]
    for view in (wide[:, 100:400], wide[:1].expand(6, -1), normal(300, 6).T):
        tokens, logprobs = sampler(view, u, 0.7)
        expected = sampler(view.clone(memory_format=torch.contiguous_format), u.clone(), 0.7)
        assert torch.equal(tokens, expected[0]) and torch.equal(logprobs, expected[1])


def test_sampling_needs_no_triton(monkeypatch):
    """The import fails here as it does where Triton is not installed."""
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without", sampling.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    logits, u = normal(8, 300), torch.linspace(0.01, 0.99, 8)
    assert without.triton is None
    assert torch.equal(without.sample(logits, u)[0], sample(logits, u)[0])


def test_the_kernels_compile_for_cuda(tmp_path):
    """Down to machine code of an H100, in a process without the interpreter. It needs no GPU."""
    pytest.importorskip("triton.backends.nvidia")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=os.path.dirname(sampling.__file__), text=True,
                          env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True)
    assert done.stdout == "sum_blocks True\ndraw True\n" * 3, done.stderr


def test_a_rows_draw_does_not_depend_on_its_batch(sampler, monkeypatch):
    """Nor on the chunk that it is taken in, here of two rows."""
    monkeypatch.setattr(sampling, "CHUNK", 1000)
    logits = torch.randn(32, 400, generator=torch.Generator().manual_seed(0))
    draw_keys, positions = torch.tensor([draw_key(i) for i in range(32)]), torch.arange(32)
    together = sampler(logits, uniform(draw_keys, positions), 1.0)[0]
    for row in range(32):
        u = uniform(draw_keys[row:row + 1], positions[row:row + 1])
        alone = sampler(logits[row:row + 1], u, 1.0)[0]
        assert alone.item() == together[row].item()


def test_uniforms_are_uniform_along_draw_keys_and_along_positions():
    """1,000 bins, 100,000 draws: chi-square has mean 999 and standard deviation 45; 300 from the mean is
    6.7 of them.
    """
    along_positions = uniform(torch.full((100_000,), draw_key("u")), torch.arange(100_000))
    along_keys = uniform(torch.tensor([draw_key("k", i) for i in range(100_000)]), torch.tensor(3))
    for u in (along_positions, along_keys):
        assert u.min() > 0 and u.max() < 1
        assert abs(chi_square(torch.histc(u, 1000, 0, 1), torch.full((1000,), 100.0)) - 999) < 300


def test_different_parts_of_a_draw_key_give_different_streams():
    draw_keys = {draw_key(seed, phase, step, problem, sample, speaker)
                 for seed in range(2) for phase in ("train", "test") for step in range(3)
                 for problem in range(3) for sample in range(3) for speaker in ("policy", "user")}
    assert len(draw_keys) == 2 * 2 * 3 * 3 * 3 * 2
    assert draw_key(1, 23) != draw_key(12, 3)
