"""Scales, quantize and dequantize: every BF16 and every FP16 input, every code, every scale dtype."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8compile.numerics import E4M3, INT8, amax_rowwise, amax_tensorwise, dequantize, inv_scale_of, quantize
from fp8compile.numerics.scaling import exact_inv_scale, inv_scale_value, rounded_to_bf16
from tests.support.reference import (
    E8M0,
    FORMATS,
    NUMPY,
    SCALE_DTYPES,
    TWO_BYTE_DTYPES,
    U,
    all_codes,
    bits_equal,
    every_value,
    finite_values,
    random_positive_fp32,
    raw,
    reference_codes,
    reference_scale,
    reference_values,
    round_trip_bound,
)

torch.set_num_threads(1)

by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
by_scale_dtype = pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
by_input = pytest.mark.parametrize("dtype", TWO_BYTE_DTYPES, ids=str)

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126

# Scales that quantize is given: the floor, ordinary ones, inexact reciprocals, both ends of BF16's
# mantissa, those of FP32's largest amax, and E8M0 exponents.
GIVEN_SCALES = [
    *(torch.tensor(s) for s in (SMALLEST, 1e-30, 1 / 448, 0.3, 1.0, 3.0, 127.0)),
    *(torch.tensor(FP32_MAX / fmt.max) for fmt in FORMATS),
    *(torch.tensor(s, dtype=torch.bfloat16) for s in (SMALLEST, 1.0078125, 1.9921875, 2.6e36)),
    *(torch.tensor(e, dtype=torch.uint8) for e in (1, 100, 127, 140, 249)),
]


def every_amax():
    """Finite values >= 0: all of BF16's and FP16's, and 200,000 FP32 bit patterns, subnormals included."""
    two_byte = [finite_values(dtype).abs().float() for dtype in TWO_BYTE_DTYPES]
    ends = torch.tensor([FP32_MAX, SMALLEST, 2.0**-149])
    return torch.cat([*two_byte, random_positive_fp32(200_000), ends])


def one_binade():
    """All 2**23 FP32 values in [1, 2): what holds for them under a scale holds times any power of two."""
    return torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)


# ------------------------------------------------------------------------------------------------------- amax

SHAPES = [(), (1,), (7,), (1000,), (3, 5), (1, 1), (129, 2), (4, 3, 130), (2, 1, 3, 5), (2, 3, 1, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, *TWO_BYTE_DTYPES], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amax_tensorwise_is_the_largest_magnitude(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert bits_equal(amax_tensorwise(x), x.abs().max())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_amax_tensorwise_shows_a_non_finite_value_wherever_it_stands(value):
    x = torch.ones(60, 3, 4, 5)
    x.view(60, 60).fill_diagonal_(value)
    found = torch.stack([amax_tensorwise(one) for one in x])
    assert bits_equal(found, torch.full((60,), abs(value)))


@pytest.mark.parametrize("reduce", [amax_tensorwise, amax_rowwise])
def test_nan_beats_infinity_in_amax(reduce):
    x = torch.tensor([[math.inf, math.nan, 1.0], [math.nan, -math.inf, 1.0]])
    assert reduce(x).isnan().all()


def test_amax_rowwise_is_the_largest_magnitude_of_each_row():
    x = torch.randn(4, 5, 33, generator=torch.Generator().manual_seed(0))
    assert bits_equal(amax_rowwise(x), x.abs().max(-1, keepdim=True).values)


# --------------------------------------------------------------------------------------------- inverse scales


@by_format
def test_fp32_scale_is_amax_over_max_within_two_roundings(fmt):
    amax = every_amax()
    exact = amax.double() / fmt.max
    # fl(1 / max) is one rounding and the product another; the floor only ever raises.
    bound = ((1 + U) ** 2 - 1) * exact
    ours = inv_scale_of(amax, fmt).double()
    above_floor = exact >= SMALLEST
    assert ((ours - exact).abs() <= bound)[above_floor].all()
    assert (ours == SMALLEST)[exact <= SMALLEST * (1 - 2.0**-22)].all()


@by_format
def test_bf16_scale_is_the_fp32_scale_as_torch_rounds_it(fmt):
    amax = every_amax()
    assert bits_equal(inv_scale_of(amax, fmt, torch.bfloat16), nearest_bf16(inv_scale_of(amax, fmt)))


def nearest_bf16(x):
    """Positive normal FP32 numbers rounded to eight significant bits, ties up, in float64."""
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.floor(fraction * 256 + 0.5) / 256, exponent).to(torch.bfloat16)


def test_nearest_bf16_differs_from_torchs_rounding_in_ties_only():
    x = one_binade()
    differ = x[nearest_bf16(x) != x.to(torch.bfloat16)]
    assert len(differ) == 64  # of the 128 ties between neighbours, those whose lower one is even
    assert bool((differ.view(torch.int32) & 0xFFFF == 0x8000).all())


def test_integer_rounding_to_bf16_is_to_nearest_for_every_kept_half_around_every_tie():
    # Of the dropped half it only matters whether it is below, at or above the tie. No sign or NaN gets there.
    kept = torch.arange(0x0080, 0x7F80, dtype=torch.int32) << 16
    dropped = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = (kept[:, None] | dropped).view(torch.float32)
    assert bits_equal(rounded_to_bf16(x).to(torch.bfloat16), nearest_bf16(x))


@by_format
def test_e8m0_scale_is_the_fp32_scale_rounded_up_to_a_power_of_two(fmt):
    amax = every_amax()
    exact = inv_scale_of(amax, fmt).double()
    ours = reference_scale(inv_scale_of(amax, fmt, E8M0))
    mantissa, _ = torch.frexp(ours)
    assert (mantissa == 0.5).all()
    assert ((exact <= ours) & (ours < 2 * exact)).all()


@by_format
def test_e8m0_scale_brings_every_amax_to_at_most_max(fmt):
    # Exhaustive over the mantissa. INT8 alone can pass its max, since fl(1 / 127) is too small (by <
    # 2**-27) and its product with amax may be too (by U): together a relative 2**-23 at most, which
    # rounding takes back.
    amax = one_binade() * 2.0**10
    entered = amax.double() / inv_scale_value(inv_scale_of(amax, fmt, E8M0)).double()
    assert (entered <= fmt.max * (1 + (0 if fmt.is_float else 2.0**-23))).all()
    assert (entered >= fmt.max / 2 * (1 - 2.0**-23)).all()  # and wastes less than one bit


def test_e8m0_decodes_all_256_codes_as_ml_dtypes_does():
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert bits_equal(inv_scale_value(codes), torch.from_numpy(theirs))


@by_scale_dtype
@by_format
def test_codes_are_made_with_the_number_that_is_stored(fmt, scale_dtype):
    amax = torch.cat([every_amax(), torch.tensor([math.inf, math.nan])])
    exact = exact_inv_scale(amax, fmt, scale_dtype)
    assert exact.dtype == torch.float32
    assert bits_equal(exact, inv_scale_value(inv_scale_of(amax, fmt, scale_dtype)))


@by_scale_dtype
@by_format
def test_scale_of_any_finite_amax_is_at_least_the_floor_and_its_reciprocal_finite(fmt, scale_dtype):
    inv_scale = inv_scale_value(inv_scale_of(every_amax(), fmt, scale_dtype))
    assert (inv_scale >= SMALLEST).all()
    assert inv_scale.isfinite().all()
    assert inv_scale.reciprocal().isfinite().all()
    assert (inv_scale.reciprocal() >= SMALLEST).all()  # a normal number, safe where subnormals are flushed


@by_scale_dtype
@by_format
def test_scale_grows_with_amax(fmt, scale_dtype):
    inv_scale = inv_scale_value(inv_scale_of(every_amax().sort().values, fmt, scale_dtype))
    assert (inv_scale.diff() >= 0).all()


@by_input
@by_scale_dtype
@by_format
def test_every_non_finite_amax_gives_a_nan_scale_and_no_finite_one_does(fmt, scale_dtype, dtype):
    amax = every_value(dtype).abs()
    inv_scale = inv_scale_value(inv_scale_of(amax, fmt, scale_dtype))
    assert torch.equal(inv_scale.isnan(), ~amax.isfinite())


@pytest.mark.parametrize(
    ("scale_dtype", "stored"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (E8M0, torch.uint8)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 1), (3, 1)], ids=str)
def test_scale_keeps_the_shape_and_has_its_storage_dtype(scale_dtype, stored, shape):
    inv_scale = inv_scale_of(torch.ones(shape, dtype=torch.float16), E4M3, scale_dtype)
    assert (inv_scale.shape, inv_scale.dtype) == (shape, stored)


# --------------------------------------------------------------------------------------------------- quantize


@by_input
@by_format
def test_code_of_every_input_is_ml_dtypes_rounding_of_the_clipped_product(fmt, dtype):
    x = finite_values(dtype)
    for inv_scale in GIVEN_SCALES:
        ours = quantize(x, inv_scale, fmt)
        assert ours.dtype == fmt.dtype
        assert torch.equal(raw(ours), reference_codes(x, reference_scale(inv_scale), fmt)), inv_scale


@by_input
@by_format
def test_round_trip_of_every_input_is_within_the_documented_error(fmt, dtype):
    x = finite_values(dtype).double()
    for inv_scale in GIVEN_SCALES:
        x_hat = dequantize(quantize(x.to(dtype), inv_scale, fmt), inv_scale, torch.float32).double()
        in_range = x.abs() <= fmt.max * reference_scale(inv_scale)
        bound = round_trip_bound(x, x_hat, reference_scale(inv_scale), fmt)
        assert ((x_hat - x).abs() <= bound)[in_range].all(), inv_scale


@by_input
@by_format
def test_round_trip_is_monotone_in_every_input(fmt, dtype):
    x = finite_values(dtype)
    for inv_scale in GIVEN_SCALES:
        x_hat = dequantize(quantize(x, inv_scale, fmt), inv_scale, torch.float32)
        assert (x_hat[1:] >= x_hat[:-1]).all(), inv_scale


@by_input
@by_format
def test_round_trip_is_odd_in_every_input(fmt, dtype):
    x = finite_values(dtype)
    for inv_scale in GIVEN_SCALES:
        x_hat = dequantize(quantize(x, inv_scale, fmt), inv_scale, torch.float32)
        of_minus_x = dequantize(quantize(-x, inv_scale, fmt), inv_scale, torch.float32)
        assert torch.equal(of_minus_x, -x_hat), inv_scale


@by_input
@by_format
def test_codes_saturate_at_max_and_are_never_non_finite(fmt, dtype):
    x = every_value(dtype)
    x = x[~x.isnan()]  # infinities included
    for inv_scale in GIVEN_SCALES:
        code = quantize(x, inv_scale, fmt).double()
        past_the_end = x.double().abs() >= fmt.max * reference_scale(inv_scale)
        assert (code.abs() <= fmt.max).all(), inv_scale
        # Just past the end the FP32 product may fall an ulp short of max, which still rounds to max.
        assert torch.equal(code[past_the_end], fmt.max * x.double().sign()[past_the_end]), inv_scale


@by_format
def test_both_zeros_come_back_as_zero_under_any_scale(fmt):
    zeros = torch.tensor([0.0, -0.0])
    for inv_scale in GIVEN_SCALES:
        x_hat = dequantize(quantize(zeros, inv_scale, fmt), inv_scale, torch.float32)
        assert torch.equal(x_hat, torch.zeros(2)), inv_scale


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@by_format
def test_amax_itself_gets_the_largest_code_however_its_scale_was_rounded(fmt, scale_dtype):
    # BF16 rounds by at most 2**-8 / (1 + 2**-8), so y >= 127 * (1 + 2**-8) / (1 + 2**-7) = 126.508, which
    # rounds to 127; the floats' last gap is max / 14 or more. Where the scale was rounded down, y exceeds
    # max.
    amax = every_amax()
    amax = amax[amax >= fmt.max * SMALLEST * (1 + 2.0**-8)]  # above the floor
    inv_scale = inv_scale_of(amax, fmt, scale_dtype)
    assert (quantize(amax, inv_scale, fmt).float() == fmt.max).all()


@by_format
def test_clamping_codes_is_needed(fmt):
    # Without it a scale rounded down would carry some values past max.
    amax = every_amax()
    assert (amax.double() > fmt.max * inv_scale_of(amax, fmt, torch.bfloat16).double()).any()


@by_format
def test_amax_under_an_e8m0_scale_gets_a_code_in_the_upper_half(fmt):
    amax = every_amax()
    amax = amax[amax >= fmt.max * SMALLEST]
    code = quantize(amax, inv_scale_of(amax, fmt, E8M0), fmt).float()
    # y > max / 2; the code nearest to it is at least that of max / 2 itself (63.5 rounds to 64).
    assert ((code >= fmt.max / 2) & (code <= fmt.max)).all()


@by_format
def test_scale_broadcasts_row_by_row(fmt):
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    inv_scale = torch.tensor([0.001, 0.01, 0.1, 1.0, 10.0])[:, None]
    by_row = torch.stack([raw(quantize(row, scale, fmt)) for row, scale in zip(x, inv_scale, strict=True)])
    assert torch.equal(raw(quantize(x, inv_scale, fmt)), by_row)


# ------------------------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("dtype", [torch.float32, *TWO_BYTE_DTYPES], ids=str)
@by_format
def test_each_code_decodes_to_its_value_times_the_scale_rounded_and_saturated(fmt, dtype):
    values = reference_values(fmt)
    usable = np.abs(values) <= fmt.max
    limit = torch.finfo(dtype).max
    for inv_scale in GIVEN_SCALES:
        ours = dequantize(all_codes(fmt)[torch.from_numpy(usable)], inv_scale, dtype)
        with np.errstate(over="ignore"):
            product = (values[usable] * reference_scale(inv_scale).numpy()).astype(np.float32)
        theirs = np.clip(product, -limit, limit).astype(NUMPY[dtype]).astype(np.float32)
        assert ours.dtype == dtype
        assert torch.equal(ours.float(), torch.from_numpy(theirs)), inv_scale


@pytest.mark.parametrize("dtype", [torch.float32, *TWO_BYTE_DTYPES], ids=str)
@by_scale_dtype
@by_format
def test_nan_scale_makes_nan_of_every_code(fmt, scale_dtype, dtype):
    nan_scale = inv_scale_of(torch.tensor(math.inf), fmt, scale_dtype)
    assert dequantize(all_codes(fmt), nan_scale, dtype).isnan().all()


@by_scale_dtype
@by_format
def test_no_finite_value_of_fp16_bf16_or_fp32_decodes_to_infinity(fmt, scale_dtype):
    fp32_end = (0x7F7FFFFF - torch.arange(2**16, dtype=torch.int32)).view(torch.float32)
    for x in (*map(finite_values, TWO_BYTE_DTYPES), fp32_end, -fp32_end):
        inv_scale = inv_scale_of(x.abs(), fmt, scale_dtype)  # each value its own amax
        assert dequantize(quantize(x, inv_scale, fmt), inv_scale, x.dtype).isfinite().all()


@by_scale_dtype
def test_saturation_is_needed(scale_dtype):
    # Without it the claim above would be false: some scale carries a largest code past 65504.
    x = finite_values(torch.float16).abs()
    inv_scale = inv_scale_of(x, INT8, scale_dtype)
    product = quantize(x, inv_scale, INT8).float() * inv_scale_value(inv_scale)
    assert product.to(torch.float16).isinf().any() == (scale_dtype != torch.float32)
