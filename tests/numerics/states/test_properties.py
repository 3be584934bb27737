"""What every state format owes, whatever its arithmetic: every BF16 value, special groups, and hypothesis' tensors.

v is rounded to nearest, and dithered as in the optimizers, which keeps order but between codes: test_dither.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8compile.numerics.formats import E4M3, E5M2
from fp8compile.numerics.states.range_expansion import KEPT, Expanded
from fp8compile.numerics.states.registry import SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY, state_codec
from tests.support.reference import U, bits_equal, finite_values, non_finite_values

torch.set_num_threads(1)

FP32_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
SMALLEST = 2.0**-126


DITHERED = " dithered v"


def codecs(group_size):
    """Every format for every state and rounding that it is for, range expansion to both targets, by a label."""
    made = {}
    for signed in (True, False):
        for name in STATE_FORMATS:
            if name not in (UNSIGNED_ONLY if signed else SIGNED_ONLY):
                label = f"{name} {'m' if signed else 'v'}"
                made[label] = state_codec(name, signed=signed, group_size=group_size, rounding="nearest")
            if not signed and name not in (*SIGNED_ONLY, "fp32", "bf16"):
                made[f"{name}{DITHERED}"] = state_codec(name, signed=False, group_size=group_size)
        for fmt in (E4M3, E5M2):
            made[f"{fmt.name}_expanded paper {'m' if signed else 'v'}"] = Expanded(signed, group_size, fmt, "paper")
    return made


GROUP = 8
CODECS, PAIRS = codecs(GROUP), codecs(2)
LABELS = tuple(CODECS)
WHOLE = tuple(label for label in LABELS if label.startswith(("fp32", "bf16")))  # nothing is shared
RANK_ONE = ("rank1_linear4 v", f"rank1_linear4{DITHERED}")
LEAST = dict.fromkeys(("linear4 v", f"linear4{DITHERED}", *RANK_ONE), 1 / 16)  # of amax: what an exact 0 becomes
LEAST |= dict.fromkeys(("log2 v", f"log2{DITHERED}"), 1 / 64)
WITHOUT_ZERO = tuple(LEAST)
BF16_AMAX = ("int4_companded m",)
CLASS_IN_AMAX = ("log4 v", f"log4{DITHERED}")  # amax is right to 2**-19
LINEAR = tuple(label for label in LABELS if label.split()[0] in ("e4m3", "e5m2", "int8"))
EXPANDED = tuple(label for label in LABELS if "expanded" in label)
SUBNORMALS_KEPT = (*WHOLE, "dynamic_tree m", "dynamic4 m", "int8_companded m")
by_label = pytest.mark.parametrize("label", LABELS)
in_groups_only = pytest.mark.parametrize("label", [label for label in LABELS if label not in WHOLE])


def decoded(codec, x):
    return codec.decode(codec.encode(x), x.shape)


def is_signed(label):
    return label.endswith("m")


def is_in_order(label):
    return not label.endswith(DITHERED)


def state(label, *shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x if is_signed(label) else x.square()


# ---------------------------------------------------------------------------------------------- every BF16 value


@by_label
@pytest.mark.parametrize("beside", [0.0, BF16_MAX, 57344.0, 1.0, 3e-6, 1e-18, 1e-36, SMALLEST, 1e-40])
def test_every_bf16_value_is_finite_in_order_and_never_zero_beside_any_other(label, beside):
    # Groups of two; of rank one, rows of two, whose scales are the larger of the two and what is beside.
    every = finite_values(torch.bfloat16).float()
    every = every if is_signed(label) else every[every >= 0]
    x = torch.stack([every, torch.full_like(every, beside)], 1)
    codec = PAIRS[label]
    x_hat = decoded(codec, x)
    assert x_hat.isfinite().all()
    if is_in_order(label) or label not in LINEAR:  # their inv_scale has a floor, where amax is no code
        assert ((x_hat[:, 0] <= x_hat[:, 1]) | (x[:, 0] > x[:, 1])).all()
        assert ((x_hat[:, 0] >= x_hat[:, 1]) | (x[:, 0] < x[:, 1])).all()
    if not is_signed(label) or label in EXPANDED:
        held = x.abs() >= 2.0**-133 if label.startswith("bf16") else x != 0  # all that BF16 can hold
        held = x.abs() >= KEPT if label in EXPANDED else held
        assert (x_hat[held] != 0).all()
    if label not in WITHOUT_ZERO:
        assert (x_hat[x == 0] == 0).all()
    below = x[:, 0].abs() <= beside
    if label not in EXPANDED and is_in_order(label):  # the amax is the same in all of these, but k is not
        assert (x_hat[below, 0].diff() >= 0).all()
    if is_signed(label):
        assert torch.equal(decoded(codec, -x), -x_hat)


# -------------------------------------------------------------------------------------------------- special groups


@by_label
@pytest.mark.parametrize("shape", [(), (1,), (GROUP,), (3, GROUP + 3), (2, 3, 5), (2, 64, 3, 3)], ids=str)
def test_all_zero_states_come_back_as_exact_zeros(label, shape):
    for zero in (0.0, -0.0):
        x_hat = decoded(CODECS[label], torch.full(shape, zero))
        assert torch.equal(x_hat, torch.zeros(shape))


@by_label
@pytest.mark.parametrize("value", [3.1e38, 57344.3, 1.0, 0.7, 1e-6, 1.3e-18, 1e-30])
def test_constant_groups_come_back_exactly_or_within_three_roundings_in_the_linear_formats(label, value):
    # BF16 rounds; e4m3, e5m2 and int8 multiply by 1 / max (itself rounded) and again by max: (1 + U)**3.
    for shape in ((1,), (GROUP,), (3, GROUP + 3), (2, 64, 3, 3)):
        x = torch.full(shape, value)
        x_hat = decoded(CODECS[label], x)
        if label in LINEAR:
            assert ((x_hat.double() / x - 1).abs() <= (1 + U) ** 3 - 1).all()
        elif label in CLASS_IN_AMAX:
            assert ((x_hat.double() / x - 1).abs() <= 2.0**-19).all()
        else:
            is_bf16 = label.startswith("bf16") or label in BF16_AMAX
            assert torch.equal(x_hat, x.bfloat16().float() if is_bf16 else x)


@by_label
@pytest.mark.parametrize("value", [1e-38, 1e-40, 2.0**-149])
def test_subnormal_groups_are_kept_or_count_as_the_smallest_there_is_and_are_not_zero_in_v_but_where_expanded(
    label, value
):
    x = torch.full((2, GROUP), value)
    x_hat = decoded(CODECS[label], x)
    if label.startswith("bf16") or label in BF16_AMAX:
        assert torch.equal(x_hat, x.bfloat16().float())
    elif label in LINEAR:
        # inv_scale is at its floor: m errs by half a code or half_ulp, v by a code, of 2**-126 at most.
        assert ((x_hat - x).abs() <= SMALLEST).all() and (is_signed(label) or (x_hat > 0).all())
    else:
        if label in EXPANDED:
            assert ((x_hat >= 0) & (x_hat <= SMALLEST)).all()
        else:
            assert torch.equal(x_hat, x if label in SUBNORMALS_KEPT else torch.full_like(x, SMALLEST))


@by_label
def test_zeros_wherever_they_stand_change_nothing_for_the_others(label):
    values = torch.tensor([3e-3, 0.7, 1e-2, 5.0, 2e-3, 0.11, 8e-3, 0.4])
    places = torch.arange(1, 2**GROUP)[:, None] >> torch.arange(GROUP) & 1 == 1
    x = torch.where(places, values, 0.0)
    # Twice, so that each stands in the same place of the tensor: first with zeros, then with its largest in their stead.
    filled = torch.where(places, values, x.amax(1, keepdim=True))
    codec = CODECS[label]
    with_zeros, without = (torch.stack([decoded(codec, row[None])[0] for row in each]) for each in (x, filled))
    assert torch.equal(with_zeros[places], without[places])
    if label in WITHOUT_ZERO and label not in RANK_ONE:
        assert torch.equal(with_zeros[~places], (x.amax(1, keepdim=True) * LEAST[label]).expand_as(x)[~places])
    elif label not in WITHOUT_ZERO:
        assert (with_zeros[~places] == 0).all()


@in_groups_only
@pytest.mark.parametrize("shape", [(5, 2 * GROUP), (5, 2 * GROUP + 3)], ids=str)
def test_every_inf_and_nan_spoils_its_group_and_no_other(label, shape):
    codec, x = CODECS[label], state(label, *shape)
    before, group_of_each = decoded(codec, x), torch.arange(shape[1]) // GROUP
    bad = non_finite_values(torch.bfloat16).float()
    for at, value in enumerate([*bad[:: max(1, len(bad) // 40)], math.inf, -math.inf]):
        row, column = at % 5, at % shape[1]
        spoilt = x.clone()
        spoilt[row, column] = value
        nan = torch.zeros(shape, dtype=torch.bool)
        nan[row] = True if label in RANK_ONE else group_of_each == group_of_each[column]
        if label in RANK_ONE:  # its row and its column
            nan[:, column] = True
        x_hat = decoded(codec, spoilt)
        assert x_hat[nan].isnan().all()
        assert bits_equal(x_hat[~nan], before[~nan])


@pytest.mark.parametrize("label", WHOLE)
def test_whole_states_keep_inf_and_nan_to_themselves(label):
    x = torch.tensor([1.0, math.inf, -math.inf, math.nan, 0.5])
    assert bits_equal(decoded(CODECS[label], x), x)


@pytest.mark.parametrize("label", [label for label in LABELS if label not in (*WHOLE, *RANK_ONE)])
@pytest.mark.parametrize("outlier", [FP32_MAX, 1e9, 30.0])
def test_an_outlier_changes_the_bits_of_its_own_group_alone(label, outlier):
    codec, x = CODECS[label], state(label, 6, 2 * GROUP + 3)
    spoilt = x.clone()
    spoilt[2, GROUP + 1] = outlier
    own = torch.zeros(x.shape, dtype=torch.bool)
    own[2, GROUP : 2 * GROUP] = True
    (codes, *metadata), (spoilt_codes, *spoilt_metadata) = codec.encode(x), codec.encode(spoilt)
    if codes.shape == x.shape:
        assert bits_equal(codes.float()[~own], spoilt_codes.float()[~own])
    other = torch.ones(metadata[0].shape, dtype=torch.bool)
    other[2, 1] = False
    assert all(bits_equal(a[other], b[other]) for a, b in zip(metadata, spoilt_metadata, strict=True))
    assert bits_equal(decoded(codec, x)[~own], decoded(codec, spoilt)[~own])


# ------------------------------------------------------------------------------------------------------ properties

properties = settings(max_examples=200, deadline=None, derandomize=True)
labels = st.sampled_from(LABELS)


def tensors(elements):
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    return hnp.arrays("float32", shapes, elements=elements).map(torch.from_numpy)


any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def of_kind(label, x):
    return x if is_signed(label) else x.abs()


@properties
@given(x=tensors(any_finite), label=labels)
def test_property_finite_in_finite_out_no_zero_in_v_and_no_other_sign(x, label):
    x = of_kind(label, x)
    codec = CODECS[label]
    x_hat = decoded(codec, x)
    if label.startswith("bf16"):  # rounds past its largest to infinity, as any cast does
        assert bits_equal(x_hat, x.bfloat16().float())
        return
    assert x_hat.shape == x.shape and x_hat.isfinite().all()
    assert (x_hat * x.sign() >= 0).all()
    if not is_signed(label) or label in EXPANDED:
        assert (x_hat[x.abs() >= KEPT if label in EXPANDED else x != 0] != 0).all()
    if label not in WITHOUT_ZERO:
        assert (x_hat[x == 0] == 0).all()


@properties
@given(x=tensors(any_finite), label=labels.filter(is_signed))
def test_property_decoding_is_odd(x, label):
    assert torch.equal(decoded(CODECS[label], -x), -decoded(CODECS[label], x))


@properties
@given(x=hnp.arrays("float32", GROUP, elements=any_finite).map(torch.from_numpy), label=labels.filter(is_in_order))
def test_property_order_within_a_group_is_kept(x, label):
    # log2 need not be monotone between neighbours, so of expanded states BF16 values are asked: test_range_expansion.py.
    x = of_kind(label, x.bfloat16().float().clamp(-3e38, 3e38) if label in EXPANDED else x)
    ascending = x.sort().values
    x_hat = decoded(CODECS[label], ascending)
    assert (x_hat[1:] >= x_hat[:-1]).all()


# Nothing underflows or saturates: the largest is 2**-80 at least when scaled, E5M2's smallest code 2**-32 of that.
positive = st.floats(2.0**-40, 2.0**40, width=32)
moderate = positive | positive.map(lambda value: -value) | st.just(0.0)


@properties
@given(x=tensors(moderate), label=labels.filter(lambda label: label not in EXPANDED), power=st.integers(-40, 40))
def test_property_scaling_by_a_power_of_two_scales_what_is_decoded_exactly(x, label, power):
    # Only of expanded states the logarithms round differently: their bound is proved at scales from 1e-30 to 1e38.
    x = of_kind(label, x)
    codec = CODECS[label]
    assert torch.equal(decoded(codec, x * 2.0**power), decoded(codec, x) * 2.0**power)


@properties
@given(x=tensors(any_finite), label=labels)
def test_property_x_is_left_as_it_was(x, label):
    x = of_kind(label, x)
    before = x.clone()
    decoded(CODECS[label], x)
    assert bits_equal(x, before)


@pytest.mark.parametrize("label", [*filter(is_in_order, EXPANDED)])
def test_expanded_states_of_any_scale_differ_by_less_than_twice_their_bound(label):
    # With E = max(half_ulp, half a subnormal step by the smallest code's y), x_hat / x lies in [1 - E, 1 + E]**(1 / k),
    # at every scale, FP32's part below 2**-10 apart: so does the quotient of two, twice over.
    codec, x = CODECS[label], state(label, 200, GROUP)
    lowest = codec.format.max / codec.target
    worst = max(codec.format.half_ulp, min(0.5, codec.format.smallest / 2 / lowest))
    _, _, k16 = codec.encode(x)
    bound = ((1 + worst) / (1 - worst)) ** (16 / (k16.float() - 1)) * (1 + 2.0**-10)
    unit = decoded(codec, x)
    for power in (-80, -60, -20, 60):  # at -100 some count as LEAST
        quotient = decoded(codec, x * 2.0**power) * 2.0**-power / unit
        assert ((quotient <= bound) & (quotient >= 1 / bound)).all()
