"""Stochastic rounding: exact probabilities at every kind of value. Its random bits: test_random_bits.py.

Where chance is measured, the seed is fixed and the bound is six standard deviations of what ideal random bits would
give (one test in 5e8 would fail by chance), or five where that is said.
"""

import inspect
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.numerics.rounding import index_like, key_of, random_bits, round_stochastically
from tests.numerics.test_random_bits import stream
from tests.sm90 import fake_h100
from tests.support.reference import TWO_BYTE_DTYPES, bits_equal, every_value, finite_values, random_positive_fp32
from tests.support.weights import both_ways, masters

torch.set_num_threads(1)

by_dtype = pytest.mark.parametrize("dtype", TWO_BYTE_DTYPES, ids=str)

ALL_ONES = 2**32 - 1
FP32_MAX = torch.finfo(torch.float32).max


def rounded(x, dtype, bits):
    """``round_stochastically`` with the same bits for every element."""
    return round_stochastically(x, dtype, torch.full(x.shape, bits, dtype=torch.int64))


def neighbours(x, dtype):
    """Of FP32 magnitudes, float64: the largest value of the dtype that is <= x, and the next; of the last, that itself."""
    values = finite_values(dtype)
    values = values[values >= 0].double().unique()
    below = torch.searchsorted(values, x.double(), right=True) - 1
    return values[below], values[(below + 1).clamp_max(len(values) - 1)]


def magnitudes(dtype):
    """FP32: every magnitude of the dtype, what lies just beside it and between it and the next, and 200,000 others."""
    values = finite_values(dtype)
    values = values[values >= 0].float()
    inf = torch.tensor(torch.inf)
    between = [values[:-1] + values.diff() * part for part in (0.2, 0.5, 0.8)]
    beside = [torch.nextafter(values, inf), torch.nextafter(values[1:], -inf)]
    tiny = torch.rand(50_000, generator=torch.Generator().manual_seed(1)) * 2.0**-20
    x = torch.cat([values, *between, *beside, tiny, random_positive_fp32(200_000)])
    return x[x.isfinite()].abs()


# ------------------------------------------------------------------------------------------- one value's rounding


@pytest.mark.parametrize("bits", [0, ALL_ONES])
@by_dtype
def test_every_value_of_the_dtype_stays(dtype, bits):
    values = every_value(dtype)  # NaN and the infinities included
    assert bits_equal(rounded(values.float(), dtype, bits), values)


@by_dtype
def test_the_number_of_random_words_that_round_up_is_the_distance_from_the_lower_neighbour(dtype):
    # Rounding up starts at one word and holds for all above it (next test), so testing both sides of that word counts
    # them: F of 2**32, where F / 2**32 is the distance from the lower neighbour. That is exact unless bits of x lie
    # below the fraction's 32nd; then F is rounded down.
    x = magnitudes(dtype)
    low, high = neighbours(x, dtype)
    inside = high > low  # not at the largest value or beyond
    x, low, high = x[inside], low[inside], high[inside]
    distance = (x.double() - low) / (high - low) * 2.0**32  # exact: differences of near numbers, and a power of two
    count = distance.floor().to(torch.int64)
    assert torch.equal(count.double(), distance) or dtype == torch.float16
    assert (distance == count)[x >= 2.0**-33].all()
    for bits, expected in ((2**32 - 1 - count, low), (2**32 - count, high)):
        ours = round_stochastically(x, dtype, bits.clamp_max(ALL_ONES)).double()
        # Of a value of the dtype (F = 0) no word rounds up.
        assert torch.equal(ours, torch.where(bits <= ALL_ONES, expected, low))


@by_dtype
def test_rounding_is_monotone_in_the_random_word(dtype):
    x = torch.cat([magnitudes(dtype)[::101], torch.tensor([2.0**-25, 2.0**-34, 2.0**-60])])
    words = [0, 1, 2**13, 2**16 - 1, 2**16, 2**19, 2**30, 2**31 - 1, 2**31, 2**32 - 2**16, ALL_ONES]
    by_word = torch.stack([rounded(x, dtype, word).float() for word in words])
    assert (by_word.diff(dim=0) >= 0).all()


@by_dtype
@pytest.mark.parametrize("x", [1.2, -1.2, 1 / 3, 0.1, 77.7, -5e4, 3e-5, 2.0**-16.5, 1.0])
def test_mean_over_all_random_words_is_the_value_itself(dtype, x):
    # At most 16 bits are dropped from any of these in either dtype (FP16 spaces its subnormals, below 2**-14, by 2**-24,
    # and 2**-16.5 has bits down to 2**-40), so the words' upper 16 are all there is to vary. The sum is exact in float64.
    words = torch.arange(2**16) << 16
    value = torch.tensor(x)
    ours = round_stochastically(value.expand(2**16), dtype, words)
    assert ours.double().mean() == value.double()


@by_dtype
def test_only_the_two_neighbours_ever_come_out(dtype):
    x = magnitudes(dtype)
    x = torch.cat([x, -x])
    low, high = neighbours(x.abs(), dtype)
    ours = round_stochastically(x, dtype, stream(len(x)))
    assert ((ours.abs().double() == low) | (ours.abs().double() == high)).all()
    assert torch.equal(ours.signbit(), x.signbit())


@by_dtype
def test_rounding_is_odd(dtype):
    x = magnitudes(dtype)
    bits = stream(len(x), step=1)
    assert bits_equal(round_stochastically(-x, dtype, bits), -round_stochastically(x, dtype, bits))


@by_dtype
@pytest.mark.parametrize("bits", [0, ALL_ONES])
def test_what_is_past_the_largest_value_stays_at_it_and_never_becomes_infinite(dtype, bits):
    largest = torch.tensor(torch.finfo(dtype).max)
    past = torch.stack([torch.nextafter(largest, torch.tensor(torch.inf)), largest * 1.0001, torch.tensor(FP32_MAX)])
    ours = rounded(torch.cat([past, -past]), dtype, bits)
    assert torch.equal(ours.float(), torch.cat([largest.expand(3), -largest.expand(3)]))


@by_dtype
def test_infinities_nan_and_signed_zeros_stay(dtype):
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert bits_equal(rounded(x, dtype, ALL_ONES), x.to(dtype))


@by_dtype
def test_next_to_the_largest_value_rounding_up_is_allowed(dtype):
    largest = torch.tensor(torch.finfo(dtype).max)
    x = torch.nextafter(largest, torch.tensor(0.0))
    assert rounded(x, dtype, ALL_ONES) == largest


def test_other_dtypes_are_declined_with_the_cure():
    with pytest.raises(ValueError, match=r"not to torch\.float32: choose one of the two"):
        rounded(torch.ones(1), torch.float32, 0)


# -------------------------------------------------------------------------------------------------------- the mean


@pytest.mark.parametrize(
    ("dtype", "unit", "below"),
    [
        (torch.bfloat16, 1.0, 128.0),  # BF16's values are 1 apart from 128 to 256
        (torch.float16, 1.0, 1024.0),
        (torch.float16, 2.0**-24, 0.0),  # a subnormal
        (torch.bfloat16, 2.0**-133, 0.0),
    ],
)
def test_a_fifth_of_the_way_is_rounded_down_in_80_percent(dtype, unit, below):
    # 1.2 on a grid of 1. Binomial, n = 2**18, p = 0.2: the standard deviation of the share is sqrt(p (1 - p) / n).
    n = 2**18
    x = (torch.tensor(1.2) * unit + below).expand(n)
    ours = (round_stochastically(x, dtype, stream(n, seed=1)).double() - below) / unit
    share_of_2 = (ours == 2).double().mean().item()
    assert ((ours == 1) | (ours == 2)).all()
    # x is an FP32 number, so it lies a fifth of the way to within half its own spacing, which is 2**-13 at 1024.
    exact = (x[0].double().item() - below) / unit - 1
    assert abs(exact - 0.2) < 2.0**-13
    assert abs(share_of_2 - exact) < 6 * math.sqrt(0.2 * 0.8 / n)


def test_mean_over_many_draws_is_near_the_value_as_torchao_asserts():
    # torchao: mean over 100,000 draws, rtol = 3e-5. The standard deviation of one draw is at most half a spacing, 2**-8
    # of x; over 100,000 that is 1.2e-5, which 3e-5 exceeds 2.4 times only. Over 2**19 it is 5.4e-6: 5.5 times.
    n = 2**19
    x = torch.rand(32, generator=torch.Generator().manual_seed(0)) * 100
    for i, value in enumerate(x):
        ours = round_stochastically(value.expand(n), torch.bfloat16, stream(n, parameter=i))
        torch.testing.assert_close(ours.double().mean(), value.double(), atol=3e-5, rtol=3e-5)


def test_small_updates_add_up_where_rounding_to_nearest_loses_them_all():
    # 256 steps of 2**-12 from 1: each is 1/32 of BF16's spacing. The walk's steps are of 2**-7 with probability 1/32
    # (while below 2), so its variance is at most 256 * 2**-14 / 32 = 2**-11; over 4096 elements the mean's standard
    # deviation is 2**-11.5.
    n, steps, update = 4096, 256, 2.0**-12
    weight, nearest = torch.ones(n, dtype=torch.bfloat16), torch.ones(n, dtype=torch.bfloat16)
    for step in range(steps):
        weight = round_stochastically(weight.float() + update, torch.bfloat16, stream(n, step=step))
        nearest = (nearest.float() + update).to(torch.bfloat16)
    assert (nearest == 1).all()
    assert abs(weight.double().mean().item() - (1 + steps * update)) < 6 * 2.0**-11.5


# ------------------------------------------------------------------------------------- the same bits everywhere


def update(x, step, parameter, first):
    bits = random_bits(index_like(x.shape, first), key_of(11, parameter, step))
    return bits, *(round_stochastically(x, dtype, bits) for dtype in TWO_BYTE_DTYPES)


def inputs():
    """FP32 of every magnitude and kind, and a step, a parameter and a first element past 2**32."""
    x = torch.cat(
        [random_positive_fp32(4000), random_positive_fp32(1000) * 2.0**-60, magnitudes(torch.float16)[:3000]]
    )
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, FP32_MAX, 65505.0])])
    return x, torch.tensor(7.0), torch.tensor(3), torch.tensor(2**33 + 5)


def test_compiled_is_bit_equal_to_eager():
    compiled = torch.compile(update, fullgraph=True)(*inputs())
    for ours, eager in zip(compiled, update(*inputs()), strict=True):
        assert torch.equal(ours, eager) if ours.dtype == torch.int64 else bits_equal(ours, eager)


def test_traced_is_bit_equal_to_eager():
    traced = make_fx(update)(*inputs())
    assert not [node for node in traced.graph.nodes if "rand" in str(node.target)]
    for ours, eager in zip(traced(*inputs()), update(*inputs()), strict=True):
        assert torch.equal(ours, eager) if ours.dtype == torch.int64 else bits_equal(ours, eager)


# A process that plays an H100 must not import pytest, so it gets the functions as text and their inputs in a file.
IN_TRITON = """
import sys
import torch
from fp8compile.numerics.rounding import index_like, key_of, random_bits, round_stochastically
from fp8compile.numerics.states.split_weights import joined, split
from tests.support.reference import TWO_BYTE_DTYPES, bits_equal
from tests.sm90 import fake_h100, interpreter
from tests.sm90.run_interpreted import run
"""
IN_TRITON_TOO = """
fake_h100.install()
interpreter.install()
for fn, args in zip((update, both_ways), torch.load(sys.argv[1]), strict=True):
    for ours, eager in zip(run(fn, *args), fn(*args), strict=True):
        assert torch.equal(ours, eager) if ours.dtype == torch.int64 else bits_equal(ours, eager), (fn, ours.dtype)
"""


def test_generated_triton_is_bit_equal_to_eager(tmp_path):
    pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")
    if fake_h100.installed() not in fake_h100.WORKS_WITH:
        pytest.skip(f"tests/sm90 plays an H100 to {fake_h100.known_pairs()} alone")
    script = "\n".join([IN_TRITON, inspect.getsource(update), inspect.getsource(both_ways), IN_TRITON_TOO])
    (tmp_path / "script.py").write_text(script)
    torch.save([inputs(), (masters()[::40].clone(),)], tmp_path / "inputs.pt")
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}
    (tmp_path / "TMPDIR").mkdir()
    env = {**os.environ, **caches, "TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "inputs.pt")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
