"""Split master weights: every weight with every correction, and error bounds from the spacing of the joined values."""

from __future__ import annotations

import math

import pytest
import torch

from fp8compile.numerics.states.split_weights import joined, split
from tests.support.reference import (
    TWO_BYTE_DTYPES,
    bits_equal,
    every_value,
    finite_values,
    non_finite_values,
)
from tests.support.weights import both_ways, masters

torch.set_num_threads(1)

by_dtype = pytest.mark.parametrize("dtype", TWO_BYTE_DTYPES, ids=str)

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
MIN_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}  # of the smallest normal value


def every_pair(dtype):
    """All finite weights of the dtype, both zeros among them, each with all 256 corrections: ``[n, 256]`` twice."""
    weight = finite_values(dtype)
    correction = torch.arange(-128, 128).to(torch.int8)
    shape = len(weight), 256
    return weight[:, None].expand(shape).contiguous(), correction.expand(shape).contiguous()


def spacing(x, dtype):
    """Distance of joined values at x, float64: an ulp of a format with 8 more bits of mantissa and the same exponents."""
    exponent = torch.frexp(x.double())[1] - 1
    return torch.ldexp(
        torch.ones_like(x, dtype=torch.float64), exponent.clamp_min(MIN_EXPONENT[dtype]) - MANTISSA[dtype] - 8
    )


def largest_joined(dtype):
    """The dtype's largest value and 127/256 of its ulp."""
    largest = torch.finfo(dtype).max
    return largest + 127 * spacing(torch.tensor(largest), dtype).item()


# ------------------------------------------------------------------------------------------- every pair


@by_dtype
def test_every_pair_comes_back_but_for_a_negative_correction_of_zero(dtype):
    weight, correction = every_pair(dtype)
    new_weight, new_correction = split(joined(weight, correction), dtype)
    same = (new_weight.view(torch.int16) == weight.view(torch.int16)) & (new_correction == correction)
    assert torch.equal(same, ~((weight == 0) & (correction < 0)))


@by_dtype
def test_split_never_gives_zero_a_negative_correction(dtype):
    weight, correction = split(masters(), dtype)
    assert not ((weight == 0) & (correction < 0)).any()


@by_dtype
def test_a_negative_correction_of_a_zero_is_read_as_that_zero(dtype):
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)[:, None].expand(2, 128)
    correction = torch.arange(-128, 0).to(torch.int8).expand(2, 128)
    assert bits_equal(joined(zeros, correction), zeros.float())


@by_dtype
def test_joined_is_the_weight_and_so_many_256ths_of_the_gap_to_its_neighbour(dtype):
    weight, correction = every_pair(dtype)
    magnitude = weight[:, 0].abs().double()
    values = magnitude.unique()
    gaps = values.diff()
    at = torch.searchsorted(values, magnitude)
    above = gaps[at.clamp_max(len(gaps) - 1)]  # above the largest value: the gap below it, its ulp
    below = torch.where(at > 0, gaps[(at - 1).clamp_min(0)], 0.0)
    gap = torch.where(correction < 0, below[:, None], above[:, None])
    expected = magnitude[:, None] + correction.double() * gap / 256
    assert torch.equal(joined(weight, correction).abs().double(), expected)
    assert torch.equal(joined(weight, correction).signbit(), weight.signbit())


@by_dtype
def test_joined_grows_with_the_weight_and_its_correction_and_never_repeats(dtype):
    weight, correction = every_pair(dtype)
    positive = weight[:, 0] > 0
    x = joined(weight, correction)[positive].reshape(-1)
    assert (x.diff() > 0).all()


# ------------------------------------------------------------------------------------------- error


@by_dtype
def test_error_is_at_most_half_the_spacing_of_joined_values(dtype):
    x = masters()
    x = x[x.abs() <= largest_joined(dtype)]
    error = (joined(*split(x, dtype)).double() - x.double()).abs()
    assert (error <= spacing(x, dtype) / 2).all()


@by_dtype
def test_joined_is_the_nearest_value_and_of_two_as_near_the_even_one(dtype):
    # float64's round() of x / D is to nearest, ties to even; x / D and the product with D are exact.
    x = masters()
    x = x[x.abs() <= largest_joined(dtype)]
    d = spacing(x, dtype)
    assert torch.equal(joined(*split(x, dtype)).double(), (x.double() / d).round() * d)


@by_dtype
def test_weight_is_the_nearest_to_what_is_stored_and_half_way_the_larger(dtype):
    weight, correction = every_pair(dtype)
    inside = (weight.abs() < torch.finfo(dtype).max) & ((weight != 0) | (correction > 0))
    x = joined(weight, correction)[inside].double()
    values = finite_values(dtype).double().unique()
    at = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    low, high = values[at - 1], values[at]
    to_low, to_high = x - low, high - x
    larger = torch.where(x > 0, high, low)
    nearest = torch.where(to_low == to_high, larger, torch.where(to_low < to_high, low, high))
    assert torch.equal(weight[inside].double(), nearest)


@by_dtype
def test_weight_is_what_torch_casts_to_except_next_to_ties(dtype):
    x = masters()
    x = x[x.abs() <= torch.finfo(dtype).max]
    ours, theirs = split(x, dtype)[0].double(), x.to(dtype).double()
    # Where they differ, x is a tie or rounds to one: its distance from half way is at most half the spacing.
    from_half_way = (x.double() - (ours + theirs) / 2).abs()
    assert (from_half_way <= spacing(x, dtype) / 2)[ours != theirs].all()
    weights = torch.randn(2**20, generator=torch.Generator().manual_seed(1)) * 0.02
    # What lies within half a spacing of a tie goes to the larger, which is wrong below the tie, 1 in 512 of uniform
    # remainders, and for half of the ties, 1 in 2 * 2**dropped. Six standard deviations of that count.
    expected = len(weights) * (1 / 512 + 2.0 ** -(24 - MANTISSA[dtype]))
    differing = (split(weights, dtype)[0] != weights.to(dtype)).sum().item()
    assert abs(differing - expected) < 6 * math.sqrt(expected)


@by_dtype
def test_error_of_weights_is_within_flashoptims_bar(dtype):
    # Every normal x is within D / 2 <= |x| 2**-(mantissa + 9), so the NMSE is at most its square: 2**-32 in BF16.
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02
    x = x[x.abs() >= 2.0 ** MIN_EXPONENT[dtype]]
    error = joined(*split(x, dtype)).double() - x.double()
    nmse = (error.square().sum() / x.double().square().sum()).item()
    assert nmse <= 2.0 ** (-2 * (MANTISSA[dtype] + 9)) < 1e-9
    without = ((x.to(dtype).double() - x).square().sum() / x.double().square().sum()).item()
    assert without > 1e4 * nmse  # 8 bits more are 48 dB, 65536 times


def test_small_updates_add_up():
    # 2**-13 is 1/64 of BF16's spacing at 1, four joined ones: each of the 1000 sums is exact.
    weight, correction = split(torch.ones(1), torch.bfloat16)
    for _ in range(1000):
        weight, correction = split(joined(weight, correction) + 2.0**-13, torch.bfloat16)
    assert joined(weight, correction).item() == 1 + 1000 * 2.0**-13


# ------------------------------------------------------------------------------------------- what is not ordinary


@by_dtype
def test_values_of_the_dtype_have_no_correction(dtype):
    values = every_value(dtype)
    weight, correction = split(values.float(), dtype)
    assert bits_equal(weight, values)
    assert (correction == 0).all()


@by_dtype
@pytest.mark.parametrize("correction", [-128, -1, 0, 127])
def test_non_finite_weights_stay_whatever_the_correction(dtype, correction):
    values = non_finite_values(dtype)
    assert bits_equal(joined(values, torch.full(values.shape, correction, dtype=torch.int8)), values.float())


@by_dtype
def test_finite_masters_past_the_end_saturate(dtype):
    largest = largest_joined(dtype)
    past = torch.tensor([largest, torch.finfo(torch.float32).max], dtype=torch.float64).float()
    weight, correction = split(torch.cat([past, -past]), dtype)
    assert torch.equal(weight.abs().float(), torch.full((4,), torch.finfo(dtype).max))
    assert torch.equal(joined(weight, correction).double(), torch.tensor([largest, largest, -largest, -largest]))


@by_dtype
def test_splitting_is_odd_and_keeps_signed_zeros(dtype):
    x = masters()
    (weight, correction), (of_minus, correction_of_minus) = split(x, dtype), split(-x, dtype)
    assert bits_equal(of_minus, -weight)
    assert torch.equal(correction_of_minus, correction)
    zeros = torch.tensor([0.0, -0.0])
    assert bits_equal(joined(*split(zeros, dtype)), zeros)


def test_only_16_bit_floats_are_split_or_joined():
    with pytest.raises(ValueError, match=r"not to torch\.float32: choose one of the two"):
        split(torch.ones(1), torch.float32)
    with pytest.raises(ValueError, match=r"not to torch\.float32: choose one of the two"):
        joined(torch.ones(1), torch.zeros(1, dtype=torch.int8))


def test_compiled_is_bit_equal_to_eager():
    compiled = torch.compile(both_ways, fullgraph=True)(masters())
    for ours, eager in zip(compiled, both_ways(masters()), strict=True):
        assert bits_equal(ours, eager)
