"""The dynamic tree: its map from the bits as the paper draws them, and encoding as the nearest value, by bisection."""

import itertools
import math

import pytest
import torch

from fp8compile.numerics.states.dynamic_tree import DynamicTree, decode_tree, encode_tree, tree_map
from tests.support.reference import U, bits_equal, every_value, random_positive_fp32

torch.set_num_threads(1)

KINDS = list(itertools.product((True, False), (8, 4)))
by_kind = pytest.mark.parametrize(
    ("signed", "bits"), KINDS, ids=lambda v: {True: "signed", False: "unsigned"}.get(v, v)
)
SMALLEST = 2.0**-126
AMAXES = (torch.finfo(torch.float32).max, 3.3, 1.0, 1e-6, 1e-18, 2.0**-100)


def value_of_bits(code, signed, bits):
    """What a code means, read off its bits from the left."""
    text = f"{code:0{bits}b}"
    sign, text = (-1 if text[0] == "1" else 1, text[1:]) if signed else (1, text)
    if "1" not in text:
        return 0.0
    zeros, fraction = text.split("1", 1)
    i = int(fraction or "0", 2)
    return sign * 10.0 ** -len(zeros) * (0.1 + 0.9 * (i + 1) / 2 ** len(fraction))


def smallest_value(signed, bits):
    return 10.0 ** -(bits - signed - 1)


def exact_values(signed, bits):
    return torch.tensor([value_of_bits(code, signed, bits) for code in range(2**bits)], dtype=torch.float64)


def decade(a, signed, bits):
    """10**-E of magnitudes, or more: ten times the value, but no less than the last decade."""
    return (10 * a).clamp(smallest_value(signed, bits), 1)


def encoded(unit, signed, bits):
    """Codes of values in [-1, 1], each in a group with a 1."""
    pairs = torch.stack([unit, torch.ones_like(unit)], 1)
    codes, amax = encode_tree(pairs, signed, bits)
    assert (amax == 1).all()
    return codes[:, 0]


def neighbours(x, ulps=8):
    """FP32 values and those up to ``ulps`` beside them."""
    bits = x.float().view(torch.int32)[:, None] + torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    return bits.clamp(0, 0x3F800000).view(torch.float32).reshape(-1)


def dense(signed, bits):
    """Values in [0, 1]: even steps, all BF16, all magnitudes, and the ulps around values, midpoints and decades."""
    values = tree_map(signed, bits)
    values = values[values >= 0]
    special = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([10.0**-E for E in range(9)])])
    random, bf16 = random_positive_fp32(200_000), every_value(torch.bfloat16).float()
    random = torch.cat([random, random.view(torch.int32).remainder(0x3F800000).view(torch.float32)])
    every = torch.cat([torch.linspace(0, 1, 2**17 + 1), bf16, random, neighbours(special)])
    return every[(every >= 0) & (every <= 1)].unique()


@by_kind
def test_the_map_is_the_values_of_all_codes(signed, bits):
    values = exact_values(signed, bits)
    assert torch.equal(tree_map(signed, bits), values.unique())
    assert len(values.unique()) == (2**bits - 1 if signed else 2**bits)  # a sign before nothing is 0 again
    assert values.max() == 1 and values[values > 0].min() == smallest_value(signed, bits)
    if signed:
        assert torch.equal(values.unique(), -values.unique().flip(0))


def test_the_four_bit_map():
    expected = [0, 0.01, 0.055, 0.1, 0.325, 0.55, 0.775, 1]
    torch.testing.assert_close(tree_map(True, 4)[7:], torch.tensor(expected, dtype=torch.float64))


@by_kind
@pytest.mark.parametrize("amax", AMAXES)
def test_each_code_decodes_to_its_value_times_amax(signed, bits, amax):
    # 10**-E * (1 - t) * amax, t = s * step: with all roundings the decoded value is off by 10**-E * amax * (2 U t for
    # step and product, U (1 - t) each for the difference, 10**-E and two products), in all at most 4 U * 10**-E * amax
    # (t <= 0.9). Nothing underflows: amax * 1e-7 >= 2**-124.
    codes = torch.arange(2**bits, dtype=torch.uint8)
    decoded = decode_tree(codes, torch.tensor(amax), signed, bits).double()
    exact = exact_values(signed, bits)
    amax = torch.tensor(amax).double()
    assert ((decoded - exact * amax).abs() <= 4.01 * U * decade(exact.abs(), signed, bits) * amax).all()
    assert torch.equal(decoded == 0, exact == 0)
    assert (decoded[exact.abs() == 1].abs() == amax).all()


@by_kind
@pytest.mark.parametrize("amax", AMAXES)
def test_each_code_round_trips(signed, bits, amax):
    codes = torch.arange(2**bits, dtype=torch.uint8)
    again, amax_again = encode_tree(decode_tree(codes, torch.tensor(amax), signed, bits), signed, bits)
    minus_zero = codes == (2 ** (bits - 1) if signed else 2**bits)
    assert torch.equal(again, torch.where(minus_zero, 0, codes))
    assert amax_again == torch.tensor(amax)


@by_kind
def test_codes_are_those_of_the_nearest_value_by_bisection_with_midpoints(signed, bits):
    # What is rounded is s = (1 - a * 10**E) / step. Times step it carries U for the product, U for the difference and
    # 2 U for 1 / step and its product, each of something <= 1: 4 U, in values 4 U * 10**-E, from which the nearest of
    # two values may be told wrongly if a is within 4 U * 10**-E of their midpoint.
    a = dense(signed, bits)
    a = torch.cat([-a.flip(0), a]) if signed else a
    values, codes = tree_map(signed, bits), encoded(a, signed, bits)
    midpoints = (values[1:] + values[:-1]) / 2
    at = torch.bucketize(a.double(), midpoints)
    nearest, exact = values[at], exact_values(signed, bits)[codes.long()]
    beside = at.clamp(1, len(midpoints) - 1)
    distance = torch.minimum((a - midpoints[beside - 1]).abs(), (a - midpoints[beside]).abs())
    unsure = 4.01 * U * decade(a.abs().double(), signed, bits)
    clear = distance > unsure
    kept = torch.ones_like(clear) if signed else (a == 0) | (a > smallest_value(signed, bits) / 2)
    assert torch.equal(exact[clear & kept], nearest[clear & kept])
    excess = (exact - a).abs() - (nearest - a).abs()
    assert (excess[kept] <= 2 * unsure[kept]).all()
    assert (clear & kept).sum() > 0.95 * kept.sum()


@by_kind
def test_codes_are_monotone_and_the_sign_is_a_bit(signed, bits):
    a = dense(signed, bits)
    codes = encoded(a, signed, bits).int()
    assert (codes.diff() >= 0).all() and codes[0] == 0 and codes[-1] == 2 ** (bits - signed) - 1
    decoded = decode_tree(torch.arange(2 ** (bits - signed)), torch.tensor(0.7), signed, bits)
    assert (decoded.diff() > 0).all()
    if signed:
        negative = encoded(-a, signed, bits).int()
        assert torch.equal(negative, torch.where(codes == 0, 0, codes + 2 ** (bits - 1)))


@pytest.mark.parametrize("amax", (*AMAXES, 1e-30, SMALLEST, 1e-40, 2.0**-149))
def test_no_value_above_zero_of_an_unsigned_state_becomes_zero(amax):
    a = torch.cat([dense(False, 8) * amax, random_positive_fp32(100_000), torch.tensor([2.0**-149, SMALLEST])])
    a = a[a <= amax]
    pairs = torch.stack([a, torch.full_like(a, amax)], 1)
    codec = DynamicTree(False, 2)
    decoded = codec.decode(codec.encode(pairs), pairs.shape)
    assert (decoded[pairs > 0] >= SMALLEST).all() and (decoded[pairs == 0] == 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_constant_groups_come_back_exactly(signed):
    amax = random_positive_fp32(50_000)[:, None]
    codec = DynamicTree(signed, 3)
    decoded = codec.decode(codec.encode(amax.expand(-1, 3)), (len(amax), 3))
    expected = amax if signed else amax.clamp_min(SMALLEST)  # 1 / sqrt(v) is to see no subnormal
    assert torch.equal(decoded, expected.expand(-1, 3))


def test_values_under_half_the_smallest_of_a_signed_state_become_zero_and_others_do_not():
    x = torch.tensor([[1.0, 0.49e-6, -0.49e-6, 0.51e-6, -0.51e-6, 1e-20]])
    codes, amax = DynamicTree().encode(x)
    assert codes.tolist() == [[127, 0, 0, 1, 129, 0]]
    assert torch.equal(DynamicTree().decode((codes, amax), x.shape) != 0, codes != 0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_group_with_a_non_finite_element_is_nan_and_the_others_are_as_they_were(value):
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    spoilt = x.index_put((torch.tensor(2), torch.tensor(77)), torch.tensor(value))
    before, after = DynamicTree().encode(x), DynamicTree().encode(spoilt)
    assert after[1].isnan().squeeze().tolist() == [False, False, True, False, False]
    others = torch.arange(5) != 2
    assert all(bits_equal(a[others], b[others]) for a, b in zip(before, after, strict=True))
    assert DynamicTree().decode(after, x.shape)[2].isnan().all()


def test_error_on_normal_values_is_under_the_bounds_that_bitsandbytes_tests_its_own_map_against():
    # bitsandbytes, tests/test_functional.py: mean absolute error under 0.011 and mean relative one under 0.018 on
    # randn(1024, 1024) in blocks of at most 256.
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    codec = DynamicTree(True, 256)
    error = (codec.decode(codec.encode(x), x.shape) - x).abs()
    assert error.mean() < 0.011
    assert (error / (x.abs() + 1e-8)).mean() < 0.018


def test_blocks_keep_an_outlier_from_the_others_and_one_block_does_not():
    # An outlier of 1e9 leaves all others (at most 5 in magnitude) below half the smallest value, 0.5e-6 * 1e9 = 500.
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).clamp(-5, 5)
    x[3, 5] = 1e9
    blocks, whole = (codec.decode(codec.encode(x), x.shape) for codec in (DynamicTree(), DynamicTree(True, None)))
    assert (blocks.flatten(1) != 0).all(1).sum() == 63
    assert (whole != 0).sum() == 1
