"""States stored linearly: against ml_dtypes' rounding and the derived bound, and what unsigned states add."""

import pytest
import torch

from fp8compile.numerics.formats import E4M3, E5M2, INT8
from fp8compile.numerics.states.plain import UINT8, LinearCodes, Whole
from tests.support.reference import (
    FORMATS,
    U,
    all_codes,
    bits_equal,
    every_value,
    finite_values,
    random_positive_fp32,
    raw,
    reference_codes,
    round_trip_bound,
)

torch.set_num_threads(1)

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_INV_SCALE = 2.0**-126
AMAXES = (FP32_MAX, 3.0e38, 57344.0, 1.0, 0.3, 1e-6, 1e-18, 1e-30, 2.0**-126, 1e-40, 2.0**-149)
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def decoded(codec, x):
    return codec.decode(codec.encode(x), x.shape)


def pairs(amax, signed):
    """Every finite BF16 value up to an amax, ascending, each in a pair with that amax: groups of two."""
    x = finite_values(torch.bfloat16).float()
    x = x[(x.abs() <= amax) & (x >= (-amax if signed else 0))]
    return torch.stack([x, torch.full_like(x, amax)], 1)


@by_format
@pytest.mark.parametrize("amax", AMAXES)
def test_signed_codes_of_every_bf16_value_are_ml_dtypes_rounding_within_the_bound(fmt, amax):
    codec, x = LinearCodes(True, 2, fmt), pairs(amax, signed=True)
    codes, inv_scale = codec.encode(x)
    assert torch.equal(raw(codes), reference_codes(x, inv_scale, fmt))
    x_hat = codec.decode((codes, inv_scale), x.shape).double()
    assert ((x_hat - x).abs() <= round_trip_bound(x.double(), x_hat, inv_scale.double(), fmt)).all()


@by_format
@pytest.mark.parametrize("amax", AMAXES)
def test_unsigned_codes_are_the_same_rounding_but_for_values_that_would_become_zero(fmt, amax):
    codec, x = LinearCodes(False, 2, fmt), pairs(amax, signed=False)
    codes, inv_scale = codec.encode(x)
    fmt = codec.code
    x_hat = codec.decode((codes, inv_scale), x.shape).double()
    raised = (x > 0) & (codes.float() == fmt.smallest)
    assert (x_hat[x > 0] > 0).all() and (x_hat[x == 0] == 0).all()
    # One raised to the smallest code errs by that at most. (smallest * inv_scale >= 2**-142 is no zero.)
    bound = round_trip_bound(x.double(), x_hat, inv_scale.double(), fmt) + raised * fmt.smallest * inv_scale.double()
    assert ((x_hat - x).abs() <= bound).all()


def test_unsigned_integers_use_the_sign_bit():
    codes, inv_scale = LinearCodes(False, 4, INT8).encode(torch.tensor([0.0, 1e-9, 0.6, 1.0]))
    assert (codes.dtype, codes.tolist()) == (torch.uint8, [0, 1, 153, 255])
    assert inv_scale.item() == pytest.approx(1 / 255)


@by_format
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_round_trips_at_every_scale(fmt, signed):
    # A group of all codes, under scales from the floor to the largest: c * s is within U of the product, its group's
    # inv_scale within 2 U of s (one product by 1 / max, itself rounded), so c * s / inv_scale is within 5 U of c.
    codec = LinearCodes(signed, 256, fmt)
    codes = all_codes(codec.code)
    values = codes.float()
    codes = codes[values.isfinite() & (values.abs() <= codec.code.max) & (values >= (-FP32_MAX if signed else 0.0))]
    for inv_scale in (FP32_MAX / codec.code.max / 2, 1.0, 1e-3, 1e-18, SMALLEST_INV_SCALE):
        stored = codes, torch.tensor([inv_scale])
        again, _ = codec.encode(codec.decode(stored, codes.shape))
        assert torch.equal(again.float(), codes.float())


@by_format
@pytest.mark.parametrize("signed", [True, False])
def test_the_largest_fp32_values_decode_to_finite_ones(fmt, signed):
    # All amaxes that three roundings up, 3 U of them, could carry past the end: 1 / max rounds none of them there.
    x = (0x7F7FFFFF - torch.arange(2**14, dtype=torch.int32)).view(torch.float32)
    for group_size in (1, 128):
        assert decoded(LinearCodes(signed, group_size, fmt), x).isfinite().all()


@by_format
@pytest.mark.parametrize("signed", [True, False])
def test_constant_groups_come_back_within_three_roundings(fmt, signed):
    # 1 / max, amax * (1 / max) and max * inv_scale: (1 + U)**3. Not under the floor of inv_scale.
    codec = LinearCodes(signed, 4, fmt)
    amax = random_positive_fp32(10000)
    amax = amax[amax >= SMALLEST_INV_SCALE * codec.code.max]
    x_hat = decoded(codec, amax[:, None].expand(-1, 4)).double()
    assert ((x_hat / amax.double()[:, None] - 1).abs() <= (1 + U) ** 3 - 1).all()


def test_whole_states_are_the_state_and_its_rounding_to_bf16():
    x = torch.cat([random_positive_fp32(10000), every_value(torch.bfloat16).float()])
    assert bits_equal(decoded(Whole(), x), x)
    assert bits_equal(decoded(Whole(torch.bfloat16), x), x.bfloat16().float())
    every = every_value(torch.bfloat16).float()
    assert bits_equal(decoded(Whole(torch.bfloat16), every), every)


def test_names():
    assert [LinearCodes(True, 1, fmt).name for fmt in (E4M3, E5M2, INT8)] == ["e4m3", "e5m2", "int8"]
    assert LinearCodes(False, 1, INT8).code == UINT8
