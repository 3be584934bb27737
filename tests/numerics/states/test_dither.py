"""Dithered rounding: thresholds evenly spread, codes unbiased, v followed where nearest loses it.

Bounds. A code is one of the two beside a value, so an error is at most the spacing there, and its mean is 0: Hoeffding's
inequality for a sum of errors e_i in an interval of length s_i,  P(|sum e_i| > t) <= 2 exp(-2 t**2 / sum s_i**2), is used
with t = 4 sqrt(sum s_i**2), which chance exceeds once in 1e13. Thresholds stand for chances to 2**-13.
"""

import pytest
import torch

from fp8compile.numerics.formats import E4M3, E5M2
from fp8compile.numerics.states.dither import dithered, dithered_to, dithered_to_bfloat16, threshold_of
from fp8compile.numerics.states.registry import SIGNED_ONLY, STATE_FORMATS, state_codec
from tests.support.reference import bits_equal, reference_values

torch.set_num_threads(1)

FORMATS = tuple(name for name in STATE_FORMATS if name not in (*SIGNED_ONLY, "bf16", "fp32"))
GROUPED = tuple(name for name in FORMATS if name != "rank1_linear4")
EXPANDED = ("e4m3_expanded", "e5m2_expanded")
LOGARITHMIC = ("log4", "log2")  # unbiased in another power of v: test_logarithmic.py
by_format = pytest.mark.parametrize("name", FORMATS)
by_grouped = pytest.mark.parametrize("name", GROUPED)
ROUNDING = 2.0**-13  # of a threshold


def codec_of(name, rounding="dithered"):
    return state_codec(name, signed=False, rounding=rounding)


def decoded(codec, x):
    return codec.decode(codec.encode(x), x.shape)


def consecutive(first, count):
    """FP32 numbers from ``first`` up."""
    return (torch.tensor(first).view(torch.int32) + torch.arange(count, dtype=torch.int32)).view(torch.float32)


def one_of_each_threshold():
    """4096 FP32 numbers in [1, 2) whose thresholds are all there are."""
    x = consecutive(1.0, 2**23)
    return x[threshold_of(x).argsort(stable=True)[::2048]]


def second_moments(rows, seed=0, width=1.0):
    """[rows, 128]: squares of Gaussians whose deviations are log-normal."""
    generator = torch.Generator().manual_seed(seed)
    deviation = torch.exp(width * torch.randn(rows, 128, generator=generator))
    return (deviation * torch.randn(rows, 128, generator=generator)).square()


# ------------------------------------------------------------------------------------------------------ thresholds


def test_each_threshold_is_that_of_2048_mantissas_and_numbers_in_sequence_have_evenly_spread_ones():
    """Of N numbers 1, 16 (BF16's squares), 128 or 4096 ulps apart each threshold is within 3.2 / N of its place."""
    every = threshold_of(consecutive(1.0, 2**23))
    assert torch.equal(every.sort().values, ((torch.arange(4096) + 0.5) / 4096).repeat_interleave(2048))
    for distance in (1, 16, 128, 4096):
        for count in (64, 512):
            sorted_ones = every[::distance].reshape(-1, count).sort(1).values
            assert (sorted_ones - (torch.arange(count) + 0.5) / count).abs().max() * count < 3.2


def test_thresholds_are_those_of_the_mantissa_alone():
    x = consecutive(1.0, 2**23)
    for factor in (-1.0, 2.0**-126, 2.0**-60, 2.0, 2.0**126, -(2.0**60)):
        assert torch.equal(threshold_of(x * factor), threshold_of(x))


# -------------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("below", [0, 1, 2, 8, 15, 254])
def test_the_mean_over_all_thresholds_is_the_number_itself_for_linear_and_square_codes(below, power):
    x = one_of_each_threshold()
    for rest in (0.0, 2.0**-12, 0.1, 0.25, 0.5, 0.77, 1 - 2.0**-12):
        y = torch.full_like(x, below + rest)
        codes = dithered(y, x, power).double()
        assert set(codes.tolist()) <= {float(below), below + 1.0}
        span = (below + 1.0) ** power - float(below) ** power
        # Half a threshold, and FP32's roundings of y (2**-24 of 255) and of the chance.
        assert abs((codes**power).mean() - y[0].double() ** power) <= (ROUNDING + 2.0**-16) * span


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("power", [1 / 3, 0.5, 0.8, 1.3, 3.0])
def test_the_mean_is_within_the_next_order_for_other_powers(fmt, power):
    # Its leading order, by expanding both chances in 1 / n, is c f (1 - f) (f (2 - c) + 2 c - 1) / (3 n**2), c half of q - 1;
    # twice that, as n is 4 at least.
    x = one_of_each_threshold()
    for whole in range(round(1 / fmt.half_ulp) // 2, round(1 / fmt.half_ulp)):
        for rest in (0.2, 0.5, 0.9):
            y = torch.full_like(x, whole + rest)
            codes = dithered_to(y, fmt, x, torch.full((1,), power)).double()
            span = (whole + 1.0) ** power - float(whole) ** power
            c = (power - 1) / 2
            bound = 2 * abs(c) * rest * (1 - rest) * abs(rest * (2 - c) + 2 * c - 1) / (3 * whole**2)
            assert abs((codes**power).mean() - y[0].double() ** power) <= (bound + ROUNDING + 2.0**-16) * span


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_numbers_become_one_of_the_two_codes_beside_them_and_codes_stay(fmt):
    values = torch.from_numpy(reference_values(fmt)).float()
    values = values[(values >= 0) & (values <= fmt.max)].unique()
    between = values[:-1, None] + values.diff()[:, None] * torch.linspace(0, 1, 65)
    x = consecutive(1.125, between.numel()).reshape(between.shape)
    codes = dithered_to(between, fmt, x).float()
    assert ((codes == values[:-1, None]) | (codes == values[1:, None])).all()
    for ulps in (-1, 0, 1):  # FP32's roundings move no code
        near = torch.where(values > 0, (values.view(torch.int32) + ulps).view(torch.float32), 0.0).clamp(max=fmt.max)
        codes = dithered_to(near[:, None].expand(-1, 4096), fmt, x.reshape(-1)[:4096]).float()
        assert torch.equal(codes, values[:, None].expand(-1, 4096))


# ---------------------------------------------------------------------------------------------------------- codecs


def test_second_moments_are_dithered_first_moments_are_not_unless_asked():
    for name in GROUPED:
        assert state_codec(name, signed=False).dithers
        assert not codec_of(name, "nearest").dithers
    assert not state_codec("e4m3", signed=True).dithers
    for signed, rounding in ((True, "dithered"), (False, "up")):
        with pytest.raises(ValueError, match="'nearest'"):
            state_codec("e4m3", signed=signed, rounding=rounding)


def codebook(codec, parts):
    """Ascending values that an element of the group of 128 with these metadata can have, of formats with byte codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(parts[0].dtype)
    values = torch.cat([codec.decode_groups(codes[None, i : i + 128], *parts[1:])[0] for i in (0, 128)])
    return values[values.isfinite() & (values >= 0)].unique()


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in ("linear4", *LOGARITHMIC)])
def test_codes_are_beside_the_value_right_on_average_and_amax_is_exact(name):
    codec, errors, squares = codec_of(name), 0.0, 0.0
    for group in second_moments(300):
        x = group[None]
        parts = codec.encode(x)
        x_hat, values = codec.decode(parts, x.shape)[0], codebook(codec, parts)
        slack = 1e-4 * group  # where a value is on a code but for FP32's roundings
        place = torch.searchsorted(values, group.clamp(values[1], values[-1])).clamp(1, len(values) - 1)
        low, high = values[place - 1], values[place]
        low, high = torch.where(group <= values[1], values[1], low), torch.where(group <= values[1], values[1], high)
        assert ((x_hat >= low - slack) & (x_hat <= high + slack)).all()
        assert x_hat[group.argmax()] == codec_of(name, "nearest").decode(parts, x.shape)[0].max()
        counted = (group > values[1]) & (group < group.max())
        spacing = (high - low).double()[counted]
        errors += ((x_hat - group).double()[counted] / group.double()[counted]).sum()
        squares += (spacing / group.double()[counted]).square().sum()
    assert abs(errors) < 4 * squares**0.5


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in LOGARITHMIC])
def test_of_many_equal_groups_at_other_scales_the_mean_is_the_group(name):
    # 2000 scales, not powers of two: other thresholds, the same value otherwise. The mean of e / s, s the spacing, is 0.
    unit = torch.linspace(0.15, 1, 128).square()
    scale = torch.logspace(-3, 3, 2000, dtype=torch.float64).float()[:, None]
    x = unit * scale if name != "rank1_linear4" else (unit * scale).reshape(-1, 1).repeat(1, 2)
    ratio = (decoded(codec_of(name), x).double() / x.double()).reshape(2000, 128, -1)[..., 0]
    spread = ratio.amax(0) - ratio.amin(0)  # the spacing, by the value
    kept = unit > 1 / 16  # 4 bit has nothing below
    bias = (ratio.mean(0) - 1)[kept].abs()
    assert (bias <= (4 / 2000**0.5 + 2 * ROUNDING) * spread[kept] + 2.0**-16).all()
    assert abs((ratio.mean(0) - 1)[kept].mean()) <= 4 * (spread.square().sum() / 2000) ** 0.5 / 128 + 2.0**-13


@by_format
def test_scaling_by_a_power_of_two_scales_what_is_decoded_exactly(name):
    if name in EXPANDED:
        return  # its logarithms round differently: tests/numerics/states/test_properties.py
    x = second_moments(20)
    for power in (-30, -1, 1, 30):
        assert torch.equal(decoded(codec_of(name), x * 2.0**power), decoded(codec_of(name), x) * 2.0**power)


@by_format
def test_encoding_is_a_pure_function(name):
    x = second_moments(20)
    first, second = codec_of(name).encode(x), codec_of(name).encode(x.clone())
    assert all(bits_equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------------------------------------------- over steps


@by_grouped
@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_codes_that_only_decay_stay_as_they_are(name, beta2):
    """For 10,000 steps, or until v is 1e-15. Range expansion first settles on a k that its own codes have: a few steps."""
    codec, v = codec_of(name), second_moments(16)
    parts = codec.encode(v)
    for step in range(10_000):
        v = codec.decode(parts, v.shape) * beta2
        parts = codec.encode(v)
        if step == 20:
            settled = codec.decode(parts, v.shape).double(), [part.clone() for part in parts]
        if v.max() < 1e-15:
            break
    changed = parts[0].view(torch.uint8) != settled[1][0].view(torch.uint8)
    assert not changed.any()


def followed(codec, steps=1000, rows=64):
    """v over v in float64, of all but the largest of each group, which stays near 1: they rise by half."""
    generator, beta2 = torch.Generator().manual_seed(0), 0.999
    v = 0.2 + 0.1 * torch.rand(rows, 128, generator=generator)
    target = 1.5 * v
    v[:, 0] = target[:, 0] = 1
    exact, stored = v.double(), codec.encode(v)
    for _ in range(steps):
        g2 = target * (0.9 + 0.2 * torch.rand(rows, 128, generator=generator))
        v = codec.decode(stored, v.shape) * beta2 + (1 - beta2) * g2
        exact = exact * beta2 + (1 - beta2) * g2.double()
        stored = codec.encode(v)
    return (v.double() / exact)[:, 1:]


# Most that codes under half of amax are apart, by amax.
SPACING = {"e4m3_expanded": 2.0**-4, "e5m2_expanded": 2.0**-3, "e4m3": 2.0**-4, "e5m2": 2.0**-3, "linear4": 2.0**-4}
SPACING |= {"bf16": 2.0**-8}


@pytest.mark.parametrize("name", SPACING)
def test_a_small_steady_addition_is_followed_where_rounding_to_nearest_loses_it(name):
    # An element on a code moves by s with a chance of d / s, d = (1 - beta2) |g2 - v| < 0.001 * 0.5: a variance below d s,
    # weighed by beta2**2 for each step since. So that of v is below d s / (1 - beta2**2); v is 0.2 at least; 5 deviations.
    ratio = followed(codec_of(name))
    variance = 0.001 * 0.5 * SPACING[name] / (1 - 0.999**2)
    bound = 5 / 0.2 * (variance / ratio.numel()) ** 0.5
    assert abs(ratio.mean() - 1) < bound
    assert followed(codec_of(name, "nearest")).mean() < 1 - bound


# ------------------------------------------------------------------------------------------------------------ BF16


def test_bf16_is_one_of_the_two_numbers_beside_a_value_and_right_on_average():
    x = consecutive(1.0, 2**20)  # of spacing 2**-7, 65536 numbers to a step
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    found = dithered_to_bfloat16(x)
    assert bits_equal(found, found.bfloat16().float())
    assert ((found == below) | (found == below + 2.0**-7)).all() and bits_equal(found[x == below], x[x == below])
    mean = (found.double() - x.double()).reshape(16, -1).mean(1)
    assert (mean.abs() <= 4 * 2.0**-7 / 65536**0.5 + ROUNDING * 2.0**-7).all()


def test_of_bf16_zeros_inf_and_nan_stay_and_no_other_becomes_one():
    kept = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    assert bits_equal(dithered_to_bfloat16(kept), kept)
    ends = consecutive(torch.finfo(torch.bfloat16).max, 65536)
    assert (dithered_to_bfloat16(ends) == ends[0]).all()
    assert (dithered_to_bfloat16(consecutive(2.0**-149, 65536)) == 2.0**-126).all()


@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_in_bf16_v_falls_with_its_gradients(beta2):
    """To a tenth of what it was; the exact mean is taken as right. Rounded to nearest a step of beta2 = 0.999 is lost.

    A jump is 2**-7 of v at most, so v's variance is 2**-8 v**2 at most (fp8compile/numerics/states/dither.py); 5 deviations.
    """
    generator, steps = torch.Generator().manual_seed(0), int(3 / (1 - beta2))
    exact = torch.ones(32, 128, dtype=torch.float64)
    kept = {name: (codec_of("bf16", name), torch.ones(32, 128)) for name in ("dithered", "nearest")}
    for _ in range(steps):
        g2 = (0.1 * torch.randn(32, 128, generator=generator)).square()
        exact = exact * beta2 + (1 - beta2) * g2.double()
        kept = {name: (codec, decoded(codec, v * beta2 + (1 - beta2) * g2)) for name, (codec, v) in kept.items()}
    found = {name: float(v.double().mean() / exact.mean()) for name, (_, v) in kept.items()}
    assert abs(found["dithered"] - 1) < 5 * (2.0**-8 / exact.numel()) ** 0.5
    assert found["nearest"] > (2.0 if beta2 == 0.999 else 1.01), found
