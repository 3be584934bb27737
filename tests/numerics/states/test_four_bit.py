"""Four-bit states: how bytes are packed, the codebook without zero, and scales of rank one."""

import math

import pytest
import torch

from fp8compile.numerics.states.four_bit import DynamicExponent4, Linear4, RankOne4, packed, unpacked
from tests.support.reference import U, bits_equal, every_value, random_positive_fp32

torch.set_num_threads(1)

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126


def decoded(codec, x):
    return codec.decode(codec.encode(x), x.shape)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------- packing


def test_every_byte_is_two_codes_the_earlier_one_low():
    every = torch.arange(256, dtype=torch.uint8)
    codes = unpacked(every, (), 512)
    assert torch.equal(codes[0::2], every % 16) and torch.equal(codes[1::2], every // 16)
    assert torch.equal(packed(codes, (), 512), every)


def test_what_is_no_code_spills_into_no_other():
    assert packed(torch.tensor([[255, 3, 4, -1]]), (1,), 4).tolist() == [[0x3F, 0xF4]]  # as a NaN may be cast


@pytest.mark.parametrize("length", [0, 1, 2, 5, 128, 129])
@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 3), (0,)], ids=str)
def test_rows_own_their_bytes_and_an_odd_row_ends_in_an_empty_half(rows, length):
    codes = torch.arange(math.prod(rows) * length).remainder(16).reshape(*rows, length)
    as_bytes = packed(codes, rows, length)
    assert (as_bytes.shape, as_bytes.dtype) == ((*rows, math.ceil(length / 2)), torch.uint8)
    assert torch.equal(unpacked(as_bytes, rows, length), codes.to(torch.uint8))
    if length % 2:
        assert (as_bytes[..., -1] < 16).all()
    if rows and rows[0] > 1:
        assert torch.equal(packed(codes[1:], (rows[0] - 1, *rows[1:]), length), as_bytes[1:])


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("codec", [DynamicExponent4(5), Linear4(5)], ids=lambda c: c.name)
def test_a_nan_group_leaves_the_other_half_of_a_shared_byte_alone(codec, value):
    x = randn(1, 20).abs() + 0.1
    for at in range(20):
        spoilt = x.clone()
        spoilt[0, at] = value
        group = torch.arange(20) // 5 == at // 5
        assert decoded(codec, spoilt)[0, group].isnan().all()
        assert bits_equal(decoded(codec, spoilt)[0, ~group], decoded(codec, x)[0, ~group])


# ----------------------------------------------------------------------------------------------- linear, no zero


def dense():
    """Values of [0, 1], with the ulps around all sixteenths and their midpoints."""
    near = (torch.arange(1, 33) / 32).view(torch.int32)[:, None] + torch.arange(-20, 21, dtype=torch.int32)
    near = near.clamp(0, 0x3F800000).view(torch.float32).reshape(-1)
    every = torch.cat([torch.linspace(0, 1, 2**16 + 1), every_value(torch.bfloat16).float(), near])
    every = torch.cat([every, random_positive_fp32(50_000)])
    return every[(every >= 0) & (every <= 1)].unique()


def test_linear_codes_are_the_nearest_sixteenth_and_never_none():
    # a * 16 is exact, and so is the comparison with halves: nothing is unsure.
    a = dense()
    x_hat = decoded(Linear4(2), torch.stack([a, torch.ones_like(a)], 1))[:, 0].double()
    grid = torch.arange(1, 17) / 16
    distance = (a.double()[:, None] - grid).abs().min(1).values
    assert torch.equal((x_hat - a).abs(), distance)
    assert torch.equal(x_hat.unique(), grid.double())
    assert (x_hat.diff() >= 0).all()


@pytest.mark.parametrize("amax", [FP32_MAX, 3.3, 1e-18, 1e-36, SMALLEST])
def test_every_linear_code_round_trips(amax):
    codes = torch.arange(16, dtype=torch.uint8)[None]
    stored = packed(codes, (1,), 16), torch.full((1, 1), amax)
    x_hat = Linear4(16).decode(stored, (1, 16))
    exact = stored[1].double() * torch.arange(1, 17) / 16
    assert ((x_hat - exact.clamp_min(SMALLEST)).abs() <= U * exact).all()
    if amax / 16 >= SMALLEST:
        assert all(bits_equal(a, b) for a, b in zip(Linear4(16).encode(x_hat), stored, strict=True))


def test_a_zero_is_a_sixteenth_where_the_group_has_something_and_zero_where_it_has_nothing():
    x = torch.tensor([[0.0, 1e-30, 3.2], [0.0, 0.0, 0.0]])
    assert torch.equal(decoded(Linear4(3), x), torch.tensor([[0.2, 0.2, 3.2], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("codec", [Linear4(3), RankOne4()], ids=lambda c: c.name)
def test_constant_groups_come_back_exactly(codec):
    for amax in random_positive_fp32(2000).tolist():
        x = torch.full((2, 3), amax)
        assert torch.equal(decoded(codec, x), x.clamp_min(SMALLEST))


@pytest.mark.parametrize("amax", [FP32_MAX, 1.0, 1e-18, 1e-36, SMALLEST, 1e-40, 2.0**-149])
@pytest.mark.parametrize("codec", [Linear4(2), RankOne4()], ids=lambda c: c.name)
def test_no_value_above_zero_becomes_zero(codec, amax):
    a = torch.cat([random_positive_fp32(50_000), every_value(torch.bfloat16).float(), torch.tensor([2.0**-149])])
    a = a[(a > 0) & (a <= amax)]
    assert (decoded(codec, torch.stack([a, torch.full_like(a, amax)], 1)) >= SMALLEST).all()


# ----------------------------------------------------------------------------------------- tree and rank one


def test_dynamic4_is_the_tree_of_four_bits():
    x = torch.tensor([[1.0, -0.76, 0.5, 0.3, -0.09, 0.06, 0.011, -0.004]])
    expected = [[1.0, -0.775, 0.55, 0.325, -0.1, 0.055, 0.01, 0.0]]
    torch.testing.assert_close(decoded(DynamicExponent4(), x), torch.tensor(expected))
    constant = random_positive_fp32(10_000)[:, None].expand(-1, 3)
    assert torch.equal(decoded(DynamicExponent4(), constant), constant)
    assert torch.equal(decoded(DynamicExponent4(), -constant), -constant)


def test_rank_one_parts_and_scales_are_the_smaller_of_row_and_column_amax():
    x = randn(6, 5, 7).square()
    codes, row, column = RankOne4().encode(x)
    assert (codes.shape, row.shape, column.shape) == ((6, 18), (6,), (35,))
    x_RC = x.reshape(6, 35)
    assert torch.equal(row, x_RC.amax(1)) and torch.equal(column, x_RC.amax(0))
    scale = torch.minimum(row[:, None], column[None]).double()
    assert (scale >= x_RC).all()
    exact = scale * ((x_RC.double() / scale * 16).round().clamp_min(1) / 16)
    x_hat = decoded(RankOne4(), x).reshape(6, 35)
    unsure = (
        (x_RC.double() / scale * 16) % 1 - 0.5
    ).abs() < 16 * 2 * U  # the quotient rounds once, half a code is near
    assert (((x_hat - exact).abs() <= U * exact) | unsure).all()
    assert ((x_hat - x_RC).abs() <= scale / 32 + (x_RC < scale / 16) * scale / 16 + 2 * U * scale).all()


def test_rank_one_codes_decode_monotonically_under_one_scale():
    a = dense()[: 255 * 255].reshape(-1)
    side = math.isqrt(len(a))
    x = torch.ones(side + 1, side + 1)
    x[:side, :side] = a[: side**2].reshape(side, side)
    x_hat = decoded(RankOne4(), x)[:side, :side]
    assert torch.equal(x_hat, decoded(Linear4(None), x)[:side, :side])
    assert (x_hat.reshape(-1).diff() >= 0).all()


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e9])
def test_what_is_not_finite_or_large_touches_its_row_and_column_only(value):
    x = randn(9, 11).square()
    spoilt = x.clone()
    spoilt[4, 6] = value
    x_hat, spoilt_hat = decoded(RankOne4(), x), decoded(RankOne4(), spoilt)
    others = torch.ones(9, 11, dtype=torch.bool)
    others[4], others[:, 6] = False, False
    assert bits_equal(x_hat[others], spoilt_hat[others])
    if math.isfinite(value):  # all else in the row is under its column's amax, which is as it was
        assert (spoilt_hat[~others].sort().values[:-1] < 10).all() and spoilt_hat[4, 6] == value
    else:
        assert spoilt_hat[~others].isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (127,), (300,)], ids=str)
def test_rank_one_of_a_vector_is_linear_in_groups_of_128(shape):
    x = randn(*shape).square()
    codes, row, column = RankOne4().encode(x)
    assert column.shape == (0,)
    assert all(bits_equal(a, b) for a, b in zip((codes, row), Linear4(128).encode(x), strict=True))
    assert bits_equal(decoded(RankOne4(), x), decoded(Linear4(128), x))


@pytest.mark.parametrize(
    "shape", [(3, 0), (0, 5), (4, 0, 2), (1, 1), (5, 1), (1, 7), (130, 130), (8, 4, 3, 3)], ids=str
)
def test_rank_one_stores_a_row_and_a_column_of_any_matrix(shape):
    x = randn(*shape).square()
    parts, columns = RankOne4().encode(x), math.prod(shape[1:])
    assert [tuple(part.shape) for part in parts] == [(shape[0], math.ceil(columns / 2)), (shape[0],), (columns,)]
    x_hat = RankOne4().decode(parts, shape)
    assert x_hat.shape == shape and (x_hat > 0).all()
