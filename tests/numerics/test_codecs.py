"""Codecs: every BF16 and every FP16 input through each of them, their layout, their bytes and their error."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp8compile.numerics import E4M3, INT8, Groupwise, GroupwiseBest, Rowwise, Tensorwise
from tests.support.codecs import (
    EVERY_CODEC,
    FP32_MAX,
    GROUP_SIZES,
    ROWWISE,
    SHAPES,
    TENSORWISE,
    decoded,
    groupwise,
    label,
    lengths_of_groups,
    normal,
    scale_of_each,
)
from tests.support.reference import (
    FORMATS,
    SCALE_DTYPES,
    TWO_BYTE_DTYPES,
    bits_equal,
    finite_values,
    non_finite_values,
    raw,
    reference_codes,
    reference_scale,
    round_trip_bound,
)

torch.set_num_threads(1)


by_codec = pytest.mark.parametrize("codec", EVERY_CODEC, ids=label)
by_input = pytest.mark.parametrize("dtype", TWO_BYTE_DTYPES, ids=label)


def with_pairs(codec):
    """The codec on groups of two, for tensors of rows of two. A tensorwise codec sees all rows at once."""
    return replace(codec, group_size=2) if hasattr(codec, "group_size") else codec


def pairs_with(amax, dtype):
    """Every finite value of a dtype up to an amax, ascending, each in a pair with that amax."""
    x = finite_values(dtype)
    x = x[x.abs().float() <= amax]
    return torch.stack([x, torch.full_like(x, amax)], 1)


# The largest amax, two ordinary ones, and a tiny one: subnormal in FP16, under the floor of scales in BF16.
AMAX = {dtype: (torch.finfo(dtype).max, 2.953125, 1.0) for dtype in TWO_BYTE_DTYPES}
AMAX[torch.bfloat16] += (2.0**-126,)
AMAX[torch.float16] += (2.0**-16,)


def every_input(dtype):
    """Rows of two: every finite value of a dtype beside a zero, and beside each of the given amaxes."""
    alone = finite_values(dtype)
    alone = torch.stack([alone, torch.zeros_like(alone)], 1)
    return [alone, *(pairs_with(amax, dtype) for amax in AMAX[dtype])]


# ------------------------------------------------------------------------------------ every input, each codec


@by_input
@by_codec
def test_codes_of_every_input_are_ml_dtypes_rounding(codec, dtype):
    codec = with_pairs(codec)
    for x in every_input(dtype):
        codes, inv_scale = codec.encode(x)
        scale = scale_of_each(codec, inv_scale, x)
        if isinstance(codec, GroupwiseBest):
            as_int, as_float = (reference_codes(x, scale.abs(), fmt) for fmt in (INT8, E4M3))
            expected = torch.where(scale < 0, as_int, as_float)
        else:
            expected = reference_codes(x, scale, codec.format)
        assert torch.equal(raw(codes), expected)


@by_input
@by_codec
def test_error_of_every_input_is_within_the_derived_bound(codec, dtype):
    codec = with_pairs(codec)
    for x in every_input(dtype):
        codes, inv_scale = codec.encode(x)
        x_hat = codec.decode(codes, inv_scale, torch.float32).double()
        x, scale = x.double(), scale_of_each(codec, inv_scale, x)
        if isinstance(codec, GroupwiseBest):
            as_int, as_float = (round_trip_bound(x, x_hat, scale.abs(), fmt) for fmt in (INT8, E4M3))
            bound = torch.where(scale < 0, as_int, as_float)
        else:
            bound = round_trip_bound(x, x_hat, scale, codec.format)
        assert ((x_hat - x).abs() <= bound).all()


@by_input
@by_codec
def test_order_of_every_two_inputs_of_one_amax_is_kept(codec, dtype):
    codec = with_pairs(codec)
    for amax in AMAX[dtype]:
        if isinstance(codec, GroupwiseBest):
            x = finite_values(dtype)  # groups of a pair may differ in format, so: one group of all values
            x = x[x.abs().float() <= amax]
            x_hat = decoded(replace(codec, group_size=len(x)), x)
        else:
            x_hat = decoded(codec, pairs_with(amax, dtype))[:, 0]
        assert (x_hat[1:] >= x_hat[:-1]).all()


@by_input
@by_codec
def test_decoding_is_odd_in_every_input(codec, dtype):
    codec = with_pairs(codec)
    for x in every_input(dtype):
        assert torch.equal(decoded(codec, -x), -decoded(codec, x))


@by_input
@by_codec
def test_every_finite_input_decodes_to_a_finite_output_of_its_own_dtype(codec, dtype):
    codec = with_pairs(codec)
    for x in every_input(dtype):
        assert decoded(codec, x, dtype).isfinite().all()


@by_codec
def test_largest_fp32_values_decode_to_finite_ones(codec):
    x = (0x7F7FFFFF - torch.arange(2**14, dtype=torch.int32)).view(torch.float32)
    for row in (x, -x, x[:1], torch.cat([x[:5], normal(300)])):
        assert decoded(codec, row).isfinite().all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
@by_codec
def test_all_zero_groups_come_back_as_exact_zeros(codec, zero):
    codes, inv_scale = codec.encode(torch.full((3, 128), zero))
    assert torch.equal(codec.decode(codes, inv_scale, torch.float32), torch.zeros(3, 128))
    assert (reference_scale(inv_scale) == 2.0**-126).all()


# ----------------------------------------------------------------------------- non-finite values and outliers


@by_input
@pytest.mark.parametrize("codec", [*ROWWISE, *groupwise(4)], ids=label)
def test_every_inf_and_nan_leaves_a_nan_scale_and_a_group_without_a_finite_value(codec, dtype):
    bad = non_finite_values(dtype)
    x = torch.ones(len(bad), 4, dtype=dtype)
    x[torch.arange(len(bad)), torch.arange(len(bad)) % 4] = bad  # in each place of a group
    codes, inv_scale = codec.encode(x)
    assert reference_scale(inv_scale).isnan().all()
    assert codec.decode(codes, inv_scale, dtype).isnan().all()


@by_input
@pytest.mark.parametrize("codec", TENSORWISE, ids=label)
def test_every_inf_and_nan_leaves_a_nan_in_a_tensorwise_scale(codec, dtype):
    bad = non_finite_values(dtype)
    x = torch.ones(3, 5, dtype=dtype)
    for at, value in enumerate(bad[:: max(1, len(bad) // 64)]):
        spoilt = x.index_put((torch.tensor(at % 3), torch.tensor(at % 5)), value)
        codes, inv_scale = codec.encode(spoilt)
        assert reference_scale(inv_scale).isnan()
        assert codec.decode(codes, inv_scale, dtype).isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, FP32_MAX, 1e4])
@pytest.mark.parametrize("codec", [*ROWWISE, *groupwise(64)], ids=label)
def test_an_outlier_or_a_nan_touches_its_own_group_only(codec, value):
    x = normal(40, 64)
    x.view(-1)[40 * 64 - 3] = 0.5
    spoilt = x.clone()
    spoilt[7, 13] = value
    (codes, inv_scale), (spoilt_codes, spoilt_inv_scale) = codec.encode(x), codec.encode(spoilt)
    others = torch.arange(40) != 7
    assert bits_equal(spoilt_codes[others], codes[others])
    assert bits_equal(spoilt_inv_scale[others], inv_scale[others])
    assert not bits_equal(spoilt_inv_scale[7], inv_scale[7])


# ----------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_codec
def test_codes_and_decoded_tensor_have_the_shape_of_x(codec, shape):
    codes, inv_scale = codec.encode(normal(*shape))
    assert codes.shape == shape
    assert codes.element_size() == 1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x_hat = codec.decode(codes, inv_scale, dtype)
        assert (x_hat.shape, x_hat.dtype) == (shape, dtype)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=label)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_rowwise_is_tensorwise_on_each_row(fmt, scale_dtype):
    for shape in SHAPES:
        x = normal(*shape)
        codes, inv_scale = Rowwise(fmt, scale_dtype).encode(x)
        assert inv_scale.shape == ((*shape[:-1], 1) if shape else ())
        rows = x.reshape(-1, *shape[-1:]) if x.numel() else []
        alone = [Tensorwise(fmt, scale_dtype).encode(row) for row in rows]
        if alone:
            assert torch.equal(raw(codes).reshape(-1), torch.cat([raw(c).reshape(-1) for c, _ in alone]))
            assert torch.equal(inv_scale.reshape(-1), torch.stack([s for _, s in alone]))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=label)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_groupwise_is_tensorwise_on_each_part_of_a_row(fmt, group_size, scale_dtype):
    for shape in SHAPES:
        x = normal(*shape)
        codes, inv_scale = Groupwise(fmt, group_size, scale_dtype).encode(x)
        lengths = lengths_of_groups(shape, group_size)
        assert inv_scale.shape == (len(lengths), 1)
        alone = [Tensorwise(fmt, scale_dtype).encode(s) for s in x.reshape(-1).split(lengths)] if lengths else []
        if alone:
            assert torch.equal(raw(codes).reshape(-1), torch.cat([raw(c) for c, _ in alone]))
            assert torch.equal(inv_scale.reshape(-1), torch.stack([s for _, s in alone]))


STRIDED = {
    "transposed": normal(70, 30).t(),
    "permuted": normal(4, 5, 33).permute(2, 0, 1),
    "strided slice": normal(40, 60)[::2, 1::3],
    "channels last": normal(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "expanded row": normal(1, 200).expand(3, 200),
    "expanded scalar": normal().expand(300),
    "offset view": normal(500)[77:],
}


@pytest.mark.parametrize("x", STRIDED.values(), ids=STRIDED)
@by_codec
def test_strides_do_not_matter(codec, x):
    (codes, inv_scale), (expected, expected_inv_scale) = codec.encode(x), codec.encode(x.contiguous())
    assert bits_equal(codes, expected)
    assert bits_equal(inv_scale, expected_inv_scale)
    x_hat, of_strided = (codec.decode(c, inv_scale, torch.float32) for c in (expected, codes))
    assert bits_equal(of_strided, x_hat)


@by_codec
def test_codes_may_be_strided_when_decoded(codec):
    codes, inv_scale = codec.encode(normal(30, 70))
    strided = codes.t().contiguous().t()
    x_hat = codec.decode(strided, inv_scale, torch.float32)
    assert bits_equal(x_hat, codec.decode(codes, inv_scale, torch.float32))


@pytest.mark.parametrize("codec", [*map(Groupwise, FORMATS), GroupwiseBest()], ids=label)
@pytest.mark.parametrize("shape", [*SHAPES, (12800,), (5, 12800), (7, 192), (2, 3, 197), (9, 17), (40, 3)], ids=str)
def test_bytes_stored_are_one_an_element_and_two_a_group(codec, shape):
    codes, inv_scale = codec.encode(normal(*shape, dtype=torch.bfloat16))
    groups = len(lengths_of_groups(shape, 128))
    assert codec.nbytes(shape) == codes.nbytes + inv_scale.nbytes == math.prod(shape) + 2 * groups


@by_codec
def test_x_is_left_as_it_was(codec):
    x = normal(3, 100)
    before = x.clone()
    decoded(codec, x)
    assert bits_equal(x, before)


@by_codec
def test_two_byte_inputs_are_coded_as_their_fp32_values(codec):
    for dtype in TWO_BYTE_DTYPES:
        x = normal(5, 77, dtype=dtype)
        assert bits_equal(decoded(codec, x), decoded(codec, x.float()))


@by_input
@by_codec
def test_decoding_to_two_bytes_is_decoding_to_fp32_rounded_where_nothing_overflows(codec, dtype):
    codes, inv_scale = codec.encode(normal(5, 77))
    wide = codec.decode(codes, inv_scale, torch.float32)
    assert bits_equal(codec.decode(codes, inv_scale, dtype), wide.to(dtype))


def test_names_are_distinct():
    codecs = [kind(fmt) for kind in (Tensorwise, Rowwise, Groupwise) for fmt in FORMATS]
    codecs += [GroupwiseBest(), Groupwise(group_size=64), GroupwiseBest(group_size=64)]
    assert len({codec.name for codec in codecs}) == len(codecs)
