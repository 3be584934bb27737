"""What every codec promises of any tensor."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.codecs import ROWWISE, TENSORWISE, decoded, groupwise, scale_of_each
from tests.support.reference import E8M0, raw, reference_scale, round_trip_bound

torch.set_num_threads(1)

properties = settings(max_examples=150, deadline=None, derandomize=True)


def tensors(elements):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
    return hnp.arrays("float32", shapes, elements=elements).map(torch.from_numpy)


any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)

codecs = st.sampled_from([*TENSORWISE, *ROWWISE, *groupwise(5)])

codecs_of_one_format = codecs.filter(lambda codec: hasattr(codec, "format"))


@properties
@given(x=tensors(any_finite), codec=codecs)
def test_property_finite_in_finite_out_and_zeros_kept(x, codec):
    x_hat = decoded(codec, x)
    assert x_hat.isfinite().all()
    assert (x_hat[x == 0] == 0).all()


@properties
@given(x=tensors(any_finite), codec=codecs_of_one_format)
def test_property_round_trip_error_is_within_the_derived_bound(x, codec):
    codes, inv_scale = codec.encode(x)
    x_hat = codec.decode(codes, inv_scale, torch.float32).double()
    bound = round_trip_bound(x.double(), x_hat, scale_of_each(codec, inv_scale, x), codec.format)
    assert ((x_hat - x.double()).abs() <= bound).all()


# Everything stays a normal number: amax * 2**k / 57344 >= 2**-116, and x / inv_scale >= 2**-60 / 2**60 * 127.
positive = st.floats(2.0**-60, 2.0**60, width=32)

moderate = positive | positive.map(lambda value: -value) | st.just(0.0)


@properties
@given(x=tensors(moderate), codec=codecs, k=st.integers(-40, 40))
def test_property_scaling_by_a_power_of_two_changes_scales_and_not_codes(x, codec, k):
    (codes, inv_scale), (scaled_codes, scaled_inv_scale) = codec.encode(x), codec.encode(x * 2.0**k)
    assert torch.equal(raw(scaled_codes), raw(codes))
    before, after = reference_scale(inv_scale), reference_scale(scaled_inv_scale)
    of_zeros = before == 2.0**-126  # the floor, which does not move
    assert torch.equal(after, torch.where(of_zeros, before, before * 2.0**k))


below_2_126 = st.floats(-(2.0**126), 2.0**126, width=32)


@properties
@given(x=tensors(below_2_126), codec=codecs.filter(lambda codec: codec.scale_dtype != torch.float32))
def test_property_decoded_tensor_is_a_fixed_point(x, codec):
    # BF16 scales: the largest code of a group is max (or the scale is at its floor), and max * inv_scale is
    # exact in FP32, so the second amax / max lies within two FP32 roundings of inv_scale, which BF16 rounds
    # away. E8M0: the largest code lies in [max / 2, max] (or, again, the floor). At max / 2 the second
    # scale is half the first, and every code doubles exactly; anywhere else it is the first. GroupwiseBest:
    # the second choice has no error at all, and where both formats have none both decode to the same. Past
    # 2**126 an E8M0 value might saturate. FP32 scales may move by an ulp, which changes no code: see below.
    once = decoded(codec, x)
    assert torch.equal(decoded(codec, once), once)


@properties
@given(x=tensors(below_2_126), codec=codecs_of_one_format.filter(lambda codec: codec.scale_dtype != E8M0))
def test_property_codes_of_a_decoded_tensor_are_the_same_under_fp32_and_bf16_scales(x, codec):
    # The largest code is max (or the scale at its floor), so the second scale is within a few U of the
    # first, and x_hat * scale within a few U of a code.
    codes, inv_scale = codec.encode(x)
    again, _ = codec.encode(codec.decode(codes, inv_scale, torch.float32))
    assert torch.equal(raw(again), raw(codes))
