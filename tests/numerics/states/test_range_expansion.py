"""Range expansion: k for every range up to 2**238, codes and decoded values against float64 and ml_dtypes.

Bounds hold for log2 and exp2 within an ulp, 2**-23 of the result or less (torch's vectors on CPUs, CUDA: 1 ulp).

  * |log2| <= 128, so each of two logarithms is within 2**-17; their difference, at most 254, adds 2**-17 by rounding:
    DELTA = 3 * 2**-17.
  * FMAX * 2**(k log2 a - k log2 amax): k <= 255/16 is exact, each product and the bracket are at most 128 k + 32 and round.
    What is rounded to a code is within SPREAD(k) = ln2 * (k * DELTA + 4 * (128 * k + 32) * U) + 3 * U of exact, relatively.
  * The exponent 16 / k16 * log2(|code| / FMAX), where the argument carries 2 U, log2 an ulp of at most 2 U of itself,
    16 / k16 and the product U each: within 16 / k16 * (3 * U + 4 * U * |log2|), U / ln2 < 1.5 U; with the shift of the
    smallest k a number below 512 that rounds. Then exp2, an ulp, twice, and two products.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8compile.numerics.formats import E4M3, E5M2
from fp8compile.numerics.states.plain import LinearCodes
from fp8compile.numerics.states.range_expansion import KEPT, LEAST, LEAST_K, MOST, SHIFTS, Expanded
from tests.support.reference import NUMPY, U, bits_equal, finite_values, random_positive_fp32, raw, reference_values

torch.set_num_threads(1)

FP32_MAX = torch.finfo(torch.float32).max
NORMAL = 2.0**-126
DELTA = 3 * 2.0**-17
CODECS = [Expanded(True, None, f, r) for f, r in itertools.product((E4M3, E5M2), ("code", "paper"))]
UNSIGNED = [Expanded(False, None, codec.format, codec.expand_range) for codec in CODECS]
DITHERED = [Expanded(False, None, codec.format, codec.expand_range, rounding="dithered") for codec in CODECS]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name} {c.expand_range}")
by_either = pytest.mark.parametrize("codec", CODECS + UNSIGNED, ids=lambda c: f"{c.name} {c.expand_range} {c.signed}")


def spread_error(k16):
    return 1.01 * (math.log(2) * (k16 / 16 * DELTA + 4 * (8 * k16 + 32) * U) + 3 * U)


def shifted(k16):
    """What the shift of the smallest k costs: a rounding of a number below 512."""
    return (k16 < 5) * 512 * U


def decode_error(log_code, k16):
    exponent = 16 / k16 * (3 * U + 4 * U * log_code.abs()) + shifted(k16)
    return 1.01 * (math.log(2) * exponent + 2 * 2 * U + 2 * U)


def is_made(codec, amax, k16, log_code):
    """Where decoding is of what encoding makes, and more: amax's place and the result are normal numbers."""
    below, binades = SHIFTS[codec.format]
    shift = binades * (below - k16).clamp_min(0)
    return (
        (k16 >= LEAST_K[codec.format]) & (amax.log2() - shift >= -126) & (amax.log2() + log_code * 16 / k16 >= -124)
    )


def decoded(codec, x_NG):
    return codec.decode_groups(*codec.encode_groups(x_NG))


def pairs_of_every_range():
    """[amin, amax] for R from 1 to 2**238: all powers of two, the ulps beside them, and ranges of every mantissa."""
    powers = 2.0 ** torch.arange(239, dtype=torch.float64)
    mantissas = 1 + torch.arange(0, 1, 2.0**-10, dtype=torch.float64)
    ranges = torch.cat(
        [powers, powers * (1 + 2.0**-23), powers[1:] * (1 - 2.0**-24), *(mantissas * p for p in powers[:238])]
    )
    pairs = []
    for log_amin in (-110, -60, -20, 0, 60):
        amin = torch.full_like(ranges, 2.0**log_amin)
        fits = amin * ranges <= MOST
        pairs.append(torch.stack([amin, amin * ranges], 1)[fits])
    random = random_positive_fp32(100_000).clamp(KEPT, MOST).reshape(-1, 2).sort(1).values
    return torch.cat([*(each.float() for each in pairs), random])


RANGES = pairs_of_every_range()
LOG_RANGE = (RANGES[:, 1:].double() / RANGES[:, :1].double()).log2()


def test_the_targets_are_the_paper_s_and_its_code_s():
    assert [codec.target for codec in CODECS] == [448**2 / 2, 448.0 * 512, 57344**2 / 2, 57344.0 * 2**16]


@by_codec
def test_k_is_the_log_of_the_target_by_that_of_the_range_in_sixteenths_rounded_down(codec):
    k16 = codec.encode_groups(RANGES)[2].double()
    exact = 16 * math.log2(codec.target)
    # The logarithms' difference is within DELTA, its quotient rounds thrice at most.
    least = (exact / (LOG_RANGE + DELTA) * (1 - 3 * U)).floor().clamp(1, 255)
    most = (exact / (LOG_RANGE - DELTA).clamp_min(1e-9) * (1 + 3 * U)).floor().clamp(1, 255)
    assert ((k16 >= least) & (k16 <= most)).all()
    assert (k16[LOG_RANGE == 0] == 255).all()


@by_either
def test_no_range_from_1_to_2_to_the_238_loses_its_smallest_element(codec):
    # k's own error is inside spread_error(k16): the code is FMAX * R**-k.
    codes, amax, k = codec.encode_groups(RANGES)
    assert (codes.float()[:, 1] == codec.format.max).all()
    assert (codes.float()[:, 0] >= codec.format.smallest).all()
    if codec.expand_range == "code":  # at least 2 / FMAX, so several subnormals, but for rounding to one of them
        assert (codes.float()[:, 0] >= 2 / codec.format.max - codec.format.smallest / 2).all()
    x_hat = codec.decode_groups(codes, amax, k)
    assert x_hat.isfinite().all() and (x_hat >= NORMAL).all()
    assert torch.equal(x_hat[:, 1], RANGES[:, 1])


@by_codec
@pytest.mark.parametrize("amax", [FP32_MAX, 3.3, 1e-18, LEAST])
def test_every_code_decodes_as_in_float64_for_every_k(codec, amax):
    values = torch.from_numpy(reference_values(codec.format))
    codes = torch.arange(256, dtype=torch.uint8)[values.abs() <= codec.format.max]
    values = values[values.abs() <= codec.format.max]
    k16 = torch.arange(1, 256, dtype=torch.uint8)[:, None]
    amax = torch.full_like(k16, amax, dtype=torch.float32)
    x_hat = codec.decode_groups(codes.view(codec.format.dtype).expand(255, -1), amax, k16).double()
    log_code = (values.abs() / codec.format.max).log2().clamp_min(-64)
    exact = amax.double() * 2 ** (log_code * 16 / k16.double())
    exact = torch.where(values == 0, 0.0, exact * values.sign())
    made = is_made(codec, amax.double(), k16.double(), log_code) | (values == 0)
    assert ((x_hat - exact).abs() <= decode_error(log_code, k16.double()) * exact.abs())[made].all()
    assert torch.equal((x_hat == 0)[made], (exact == 0)[made])
    full = values.abs() == codec.format.max
    exact_amax = k16[:, 0] >= SHIFTS[codec.format][0]
    assert torch.equal(x_hat[:, full][exact_amax], (amax.double() * values[full].sign())[exact_amax])


def wide_groups():
    """Groups of 64 of many widths and magnitudes: v of gradients of 1e-9 is 1e-18."""
    normal = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    width = torch.linspace(0, 12, 4000)[:, None]
    x = normal * torch.exp(width * torch.randn(4000, 64, generator=torch.Generator().manual_seed(1)))
    unit = x / x.abs().amax(1, keepdim=True)
    return [unit * scale for scale in (1.0, 3e-12, 1e-18, 1e-30, 1e38)]


def to_format(y, codec):
    """float64 magnitudes rounded to the format by ml_dtypes."""
    clipped = np.clip(y.numpy(), 0, codec.format.max)
    return torch.from_numpy(clipped.astype(NUMPY[codec.format.name]).astype(np.float64))


@by_codec
def test_codes_are_ml_dtypes_rounding_of_the_power_in_float64(codec):
    assert NUMPY["e4m3"] is ml_dtypes.float8_e4m3fn
    for x in (*wide_groups(), RANGES):
        codes, _, k16 = codec.encode_groups(x)
        a = x.double().abs()
        y = codec.format.max * (a / a.amax(1, keepdim=True)) ** (k16.double() / 16)
        error = spread_error(k16.double())
        magnitude, sure = codes.double().abs(), a >= LEAST
        assert (magnitude >= to_format(y * (1 - error), codec))[sure].all()
        assert (magnitude <= to_format(y * (1 + error), codec))[sure].all()
        assert torch.equal(codes.float().sign()[sure], x.sign()[sure])


@by_codec
def test_relative_error_is_within_the_derived_bound_at_every_scale(codec):
    # A code c of y has c / y in [1 - q, 1 + q]: q is half_ulp where it is normal, else half a subnormal step by y. So
    # x_hat / x is in [1 - q, 1 + q]**(1 / k), where FP32 adds spread_error**(1 / k) and decode_error.
    for x in (*wide_groups(), RANGES):
        codes, amax, k16 = codec.encode_groups(x)
        x_hat = codec.decode_groups(codes, amax, k16).double()
        a, k16 = x.double().abs(), k16.double()
        y = codec.format.max * (a / a.amax(1, keepdim=True)) ** (k16 / 16)
        q = (codec.format.smallest / 2 / y).clamp_min(codec.format.half_ulp)
        fp32 = (1 + spread_error(k16)) ** (16 / k16) * (1 + decode_error((y / codec.format.max).log2(), k16))
        ratio = torch.where(a >= KEPT, x_hat.abs() / a, 1.0)
        assert (ratio <= (1 + q) ** (16 / k16) * fp32).all()
        assert (ratio >= (1 - q).clamp_min(0) ** (16 / k16) / fp32).all()
        # As the class says it: half_ulp of y is 1 / (1 + half_ulp) of it at worst, the same up and down.
        normal = y >= codec.format.smallest / codec.format.half_ulp
        bound = (1 + codec.format.half_ulp) ** (16 / k16) * fp32 - 1
        assert (((ratio - 1).abs() <= bound) | ~normal).all()


@by_either
def test_constant_one_element_and_all_zero_groups_come_back_exactly(codec):
    amax = random_positive_fp32(50_000)[:, None].clamp(LEAST, MOST)
    for group_size in (1, 7):
        constant = amax.expand(-1, group_size)
        assert torch.equal(decoded(codec, constant), constant)
    zeros = torch.tensor([[0.0, -0.0, 0.0]])
    assert bits_equal(decoded(codec, zeros), zeros if codec.signed else zeros.abs())
    assert codec.encode_groups(torch.zeros(1, 3))[2] == 255
    assert torch.equal(decoded(codec, torch.full((1, 2), FP32_MAX)), torch.full((1, 2), MOST))
    smaller = torch.tensor([[LEAST / 2, LEAST / 3], [1e-40, 2.0**-149]])
    assert ((decoded(codec, smaller) >= 0) & (decoded(codec, smaller) <= LEAST)).all()


@by_either
def test_zeros_are_excluded_from_the_minimum_wherever_they_stand(codec):
    # COAT's kernel misses those in some places, and v's error is then 8 times as large.
    values = torch.tensor([3e-5, 0.7, 1e-2, 5.0, 2e-7, 0.11, 8e-3, 0.4])
    keep = torch.arange(1, 256)[:, None] >> torch.arange(8) & 1 == 1  # every choice of places
    x = torch.where(keep, values, 0.0)
    codes, amax, k16 = codec.encode_groups(x)
    x_hat = codec.decode_groups(codes, amax, k16)
    assert torch.equal(x_hat == 0, x == 0)
    for row in range(255):
        alone = values[keep[row]].repeat(1, 8)[:, :8]  # the same values, without zeros
        assert torch.equal(codec.encode_groups(alone)[1], amax[row : row + 1])
        log_range = max(1.0, math.log2(alone.max().double() / alone.min().double()))
        exact = 16 * math.log2(codec.target) / log_range
        unsure = exact * (DELTA / log_range + 3 * U)
        assert min(255, math.floor(exact - unsure)) <= k16[row].item() <= min(255, math.floor(exact + unsure))


@by_either
def test_every_two_bf16_values_of_a_group_keep_their_order(codec):
    # Neighbours differ by 2**-8, their logarithms by more than 2**-8, DELTA is 2**-15.4: as spread they keep their order,
    # as codes they may meet. Two codes differ by a half_ulp or more, as decoded by half_ulp / k > half_ulp / 16 > 2**-8.
    every = finite_values(torch.bfloat16).float()
    every = every[every >= (-FP32_MAX if codec.signed else 0)]
    for amax in (every.max(), 3.0, 1e-18, 1e-36):
        x = every[every.abs() <= amax]
        for lowest in (0.0, amax * 1e-3, amax * 0.5):  # k small, ordinary and large
            group = x[(x == 0) | (x.abs() >= lowest)][None]
            x_hat = decoded(codec, group)
            assert (x_hat.diff() >= 0).all() and x_hat.isfinite().all()
            assert (x_hat[group == 0] == 0).all() and (x_hat[group.abs() >= KEPT] != 0).all()
            if codec.signed:
                assert torch.equal(decoded(codec, -group), -x_hat)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@by_either
def test_a_non_finite_element_makes_its_group_nan_zeros_included(codec, value):
    x = torch.tensor([[1.0, 0.0, 2.0], [1.0, 0.0, value], [0.0, 0.0, value]])
    codes, amax, k = codec.encode_groups(x)
    x_hat = codec.decode_groups(codes, amax, k)
    assert amax[1:].isnan().all() and x_hat[1:].isnan().all()
    assert torch.equal(raw(codes[0]), raw(codec.encode_groups(x[:1])[0][0])) and x_hat[0].isfinite().all()


def moments(width):
    """Adam's after 100 steps of Gaussian gradients whose deviations are log-normal along the group."""
    generator = torch.Generator().manual_seed(0)
    deviation = 1e-4 * torch.exp(width * torch.randn(256, 128, generator=generator))
    m, v = torch.zeros(256, 128), torch.zeros(256, 128)
    for _ in range(100):
        g = deviation * torch.randn(256, 128, generator=generator)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return m, v


@pytest.mark.parametrize("width", [0.0, 0.5, 1.0])
def test_adam_s_step_errs_less_with_expansion_than_without_and_most_in_e5m2_as_in_coat_s_table(width):
    # COAT, MSE of m / (sqrt(v) + eps): E5M2 40.3, E4M3 20.1, both expanded 12.3. Where groups are wider still E4M3 loses
    # v's small values to its smallest code, and E5M2 is the better of the two.
    m, v = moments(width)
    exact, errors = m.double() / (v.double().sqrt() + 1e-8), []
    for kind, fmt in ((LinearCodes, E5M2), (LinearCodes, E4M3), (Expanded, E4M3)):
        m_hat, v_hat = (decoded(kind(x is m, 128, fmt), x).double() for x in (m, v))
        errors.append((m_hat / (v_hat.sqrt() + 1e-8) - exact).square().mean())
    assert errors[0] > errors[1] > errors[2]
