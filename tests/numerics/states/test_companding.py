"""Companded states: codes nearest on the curve, the derived error, every code at every scale, and v that is never 0."""

import math

import pytest
import torch

from fp8compile.numerics.states.companding import Companded
from tests.support.reference import U, bits_equal, every_value, random_positive_fp32

torch.set_num_threads(1)

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126
SIGNED, UNSIGNED = Companded(True, 2), Companded(False, 2)
by_codec = pytest.mark.parametrize("codec", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
LAST = {SIGNED: 127, UNSIGNED: 255}


def curve(a, codec):
    """Where float64 magnitudes of [0, 1] stand among the codes."""
    return 127 * 2 * a / (1 + a) if codec.signed else 255 * a.sqrt()


def inverse(code, codec):
    return (code / 127) / (2 - code / 127) if codec.signed else (code / 255) ** 2


def dense(codec):
    """Values of [0, 1]: even steps, all BF16, all magnitudes, the ulps around each code and each midpoint."""
    halves = inverse(torch.arange(0, 2 * LAST[codec] + 1, dtype=torch.float64) / 2, codec).float()
    near = halves.view(torch.int32)[:, None] + torch.arange(-20, 21, dtype=torch.int32)
    near = near.clamp(0, 0x3F800000).view(torch.float32).reshape(-1)
    every = torch.cat([torch.linspace(0, 1, 2**16 + 1), every_value(torch.bfloat16).float(), near])
    every = torch.cat([every, random_positive_fp32(100_000)])
    return every[(every >= 0) & (every <= 1)].unique()


def pairs(a, amax=1.0):
    return torch.stack([a, torch.full_like(a, amax)], 1)


@by_codec
def test_codes_are_the_nearest_on_the_curve(codec):
    # Signed: 1 + a' and 254 / (1 + a') carry U each, and 254 - q at most U of 254 again: 3 * 254 * U in codes.
    # Unsigned: the root and the product, 2 U of a code up to 255. And a v > 0 gets a code > 0.
    a = dense(codec)
    codes = codec.encode_groups(pairs(a))[0][:, 0].double()
    at = curve(a.double(), codec)
    unsure = 1.01 * (3 * 254 * U if codec.signed else 2 * 255 * U)
    at = at if codec.signed else torch.where(a > 0, at.clamp_min(1), 0)
    assert ((codes - at).abs() <= 0.5 + unsure).all()
    assert (codes.diff() >= 0).all()
    assert (codes[0], codes[-1]) == (0, LAST[codec])


@by_codec
@pytest.mark.parametrize("amax", [FP32_MAX, 7.7, 1.0, 1e-18, 1e-32])
def test_error_is_within_half_a_step_times_the_slope_of_the_curve(codec, amax):
    # The mean value theorem: half a step, 1 / 254 of z or 1 / 510, times the largest slope of the inverse between x and
    # x_hat: 2 / (2 - z)**2 = (1 + a)**2 / 2, or 2 z = 2 sqrt(a). FP32 adds 3 * 254 * U (2 * 255 * U) to half a code,
    # and 3 roundings of x_hat (codes / 254 - codes, * amax; 1 / 255, root, its square, * amax: 6), and v is raised
    # to code 1, amax / 65025, at most.
    a = dense(codec)
    x = a * amax
    amax = torch.full_like(x[:1], amax)
    x = torch.stack([x, amax.expand_as(x)], 1)
    codes, _ = parts = codec.encode_groups(x)
    x_hat, amax = codec.decode_groups(*parts)[:, 0].double(), amax.double()
    largest = torch.maximum(x[:, 0].double(), x_hat) / amax
    half_code = 0.5 + 4 * 255 * U
    if codec.signed:
        bound = half_code / 127 * (1 + largest) ** 2 / 2
    else:
        raised = (codes[:, 0] == 1) & (x[:, 0] > 0)
        bound = half_code / 255 * 2 * largest.sqrt() + raised / 65025
    assert ((x_hat - x[:, 0]).abs() <= (bound + 8 * U * largest) * amax).all()


def code_values(codec):
    return torch.arange(-127, 128) if codec.signed else torch.arange(256)


@by_codec
@pytest.mark.parametrize("amax", [FP32_MAX, 7.7, 1.0, 1e-18, 1e-33])
def test_every_code_round_trips(codec, amax):
    # Decoded values err by a few U of themselves, a code's steps by 255 at most of those: far from half a code.
    dtype = torch.int8 if codec.signed else torch.uint8
    codes, amax = code_values(codec).to(dtype)[None], torch.tensor([[amax]])
    x_hat = codec.decode_groups(codes, amax)
    assert (x_hat.diff() > 0).all()
    again, amax_again = codec.encode_groups(x_hat)
    assert bits_equal(again, codes) and bits_equal(amax_again, amax)
    exact = inverse(codes.double().abs(), codec) * codes.sign() * amax.double()
    assert ((x_hat - exact).abs() <= 8 * U * exact.abs()).all()
    assert (x_hat == 0).sum() == 1


@by_codec
def test_constant_groups_come_back_exactly(codec):
    amax = random_positive_fp32(50_000)[:, None]
    expected = amax if codec.signed else amax.clamp_min(SMALLEST)
    for values in (amax, amax.expand(-1, 5), torch.cat([amax, amax * 0], 1)):
        x_hat = codec.decode_groups(*codec.encode_groups(values))
        assert torch.equal(x_hat, torch.where(values == 0, 0.0, expected))


@pytest.mark.parametrize("amax", [FP32_MAX, 1.0, 1e-18, 7.8e-34, 7e-34, 1e-36, SMALLEST, 1e-40, 2.0**-149])
def test_no_second_moment_above_zero_becomes_zero_and_the_least_is_what_the_module_says(amax):
    a = torch.cat([random_positive_fp32(100_000), every_value(torch.bfloat16).float(), torch.tensor([2.0**-149])])
    x = pairs(a[(a >= 0) & (a <= amax)], amax)
    x_hat = UNSIGNED.decode_groups(*UNSIGNED.encode_groups(x))
    least = max(SMALLEST, x[0, 1].item() / 65025 * (1 - 8 * U))
    assert (x_hat[x > 0] >= least).all() and (x_hat[x == 0] == 0).all()


def test_values_between_codes_of_m_are_as_the_module_says():
    # Code 1 begins at z = 1 / 254, m' = 1 / 507 = z / (2 - z).
    x = torch.tensor([[1.0, 1 / 508, 1 / 506, -1 / 508, -1 / 506]])
    assert Companded().encode(x)[0].tolist() == [[127, 0, 1, 0, -1]]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@by_codec
def test_a_non_finite_element_makes_its_group_nan_zeros_included(codec, value):
    x = torch.tensor([[1.0, 0.0, 2.0], [1.0, 0.0, value], [0.0, 0.0, value]])
    before, after = codec.encode_groups(x[:1]), codec.encode_groups(x)
    x_hat = codec.decode_groups(*after)
    assert after[1][1:].isnan().all() and x_hat[1:].isnan().all()
    assert all(bits_equal(a[:1], b) for a, b in zip(after, before, strict=True))
