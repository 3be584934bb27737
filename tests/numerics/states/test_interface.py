"""Groups of optimizer states: their layout and bytes, tails, any shape, and what may be cut along dim 0."""

import math

import pytest
import torch

from fp8compile.numerics.formats import E4M3
from fp8compile.numerics.states.interface import (
    GROUP,
    StateCodec,
    columns_within,
    encoded_zeros,
    in_groups,
    metadata_shape,
    out_of_groups,
)
from fp8compile.numerics.states.range_expansion import Expanded
from fp8compile.numerics.states.registry import (
    ALIASES,
    SIGNED_ONLY,
    STATE_FORMATS,
    UNSIGNED_ONLY,
    state_bytes,
    state_codec,
)
from tests.support.reference import bits_equal

torch.set_num_threads(1)

# Shape: the dimensions that count rows, and the elements of a row. A row's groups are 128 each, the last one short.
ROWS = {
    (): ((), 1),
    (0,): ((), 0),
    (1,): ((), 1),
    (127,): ((), 127),
    (128,): ((), 128),
    (129,): ((), 129),
    (1000,): ((), 1000),
    (3, 0): ((3,), 0),
    (0, 5): ((0,), 5),
    (0, 130): ((0,), 130),
    (4, 0, 200): ((4, 0), 200),
    (4, 0, 1): ((4,), 0),
    (1, 600): ((1,), 600),
    (5, 1): ((5,), 1),
    (3, 100): ((3,), 100),
    (130, 130): ((130,), 130),
    (4, 3, 43): ((4,), 129),
    (2, 5, 300): ((2, 5), 300),
    (2, 3, 128): ((2, 3), 128),
    (4, 1, 7): ((4,), 7),
    (8, 64, 3, 3): ((8,), 576),
    (64, 64, 3, 3): ((64,), 576),
}
PER_BYTE = dict.fromkeys(("dynamic4", "linear4", "rank1_linear4", "int4_companded", "log4"), 2) | {"log2": 4}
IN_GROUPS = tuple(name for name in STATE_FORMATS if name not in ("fp32", "bf16", "rank1_linear4"))
by_shape = pytest.mark.parametrize("shape", ROWS, ids=str)
by_grouped = pytest.mark.parametrize("name", IN_GROUPS)
# Where torch computes log2 and exp2 on a CPU, those of the last elements of a tensor are not by vectors, and may differ
# by an ulp from those that are: of range-expanded and logarithmic states only bits in the same place are comparable.
ANYWHERE = tuple(name for name in IN_GROUPS if not name.endswith("expanded") and not name.startswith("log"))


def codecs(name, group_size=128):
    """The codec for signed states and the one for others, as far as there are such."""
    kinds = [signed for signed in (True, False) if name not in (UNSIGNED_ONLY if signed else SIGNED_ONLY)]
    return [state_codec(name, signed=signed, group_size=group_size) for signed in kinds]


def state(codec, *shape, seed=0):
    """Of many magnitudes, a tenth of it zeros; never negative where the codec's state is not."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x)
    return x if getattr(codec, "signed", False) else x.square()


@by_shape
@by_grouped
def test_shapes_of_codes_metadata_and_decoded_state_are_the_documented_ones(name, shape):
    dims, length = ROWS[shape]
    for codec in codecs(name):
        codes, *metadata = parts = codec.encode(state(codec, *shape))
        assert len(parts) == len(codec.parts)
        assert codes.shape == ((*dims, math.ceil(length / PER_BYTE[name])) if name in PER_BYTE else shape)
        assert codes.element_size() == 1
        assert all(each.shape == (*dims, math.ceil(length / 128)) for each in metadata)
        x_hat = codec.decode(parts, shape)
        assert (x_hat.shape, x_hat.dtype) == (shape, torch.float32)


def groups_of(x, shape):
    """The elements of each group, by the table."""
    dims, length = ROWS[shape]
    rows = x.reshape(math.prod(dims), length)
    return [group for row in rows for group in row.split(128) if len(group)]


@by_shape
@pytest.mark.parametrize("name", ANYWHERE)
def test_each_group_is_coded_as_if_it_stood_alone(name, shape):
    for codec in codecs(name):
        x = state(codec, *shape)
        x_hat, metadata = codec.decode(codec.encode(x), shape), codec.encode(x)[1:]
        for at, (group, decoded) in enumerate(zip(groups_of(x, shape), groups_of(x_hat, shape), strict=True)):
            parts = codec.encode(group)
            assert bits_equal(codec.decode(parts, group.shape), decoded)
            assert all(bits_equal(a.reshape(-1)[at], b[0]) for a, b in zip(metadata, parts[1:], strict=True))


@by_shape
@by_grouped
def test_each_group_is_coded_as_if_all_others_were_zero(name, shape):
    for codec in codecs(name):
        x = state(codec, *shape)
        x_hat = codec.decode(codec.encode(x), shape)
        index = groups_of(torch.arange(x.numel()).reshape(shape), shape)
        for group in index[:: max(1, len(index) // 8)]:
            zeros = torch.zeros(x.numel())
            alone = zeros.index_put((group,), x.reshape(-1)[group]).reshape(shape)
            expected = zeros.index_put((group,), x_hat.reshape(-1)[group]).reshape(shape)
            assert bits_equal(codec.decode(codec.encode(alone), shape), expected)


@pytest.mark.parametrize("shape", [shape for shape in ROWS if len(shape) > 1 and shape[0] > 1], ids=str)
@pytest.mark.parametrize("name", ANYWHERE)
def test_a_shard_along_dim_0_owns_its_part_of_every_stored_tensor(name, shape):
    for codec in codecs(name):
        x = state(codec, *shape)
        parts, cut = codec.encode(x), shape[0] // 2
        for rows in (slice(0, cut), slice(cut, None)):
            shard = [part[rows] for part in parts]
            assert all(bits_equal(a, b) for a, b in zip(shard, codec.encode(x[rows]), strict=True))
            assert bits_equal(codec.decode(shard, x[rows].shape), codec.decode(parts, shape)[rows])


@by_shape
@pytest.mark.parametrize("group_size", [1, 2, 5, 16, 128, 300, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int8, E4M3.dtype, torch.float8_e5m2], ids=str)
def test_grouping_is_undone_and_fills_short_groups_with_zeros(dtype, group_size, shape):
    x = torch.arange(math.prod(shape)).remainder(100).add(1).reshape(shape).to(dtype)
    x_NG = in_groups(x, group_size)
    assert torch.equal(out_of_groups(x_NG, shape, group_size).float(), x.float())
    assert (x_NG.float() > 0).sum() == x.numel()
    assert math.prod(x_NG.shape[:-1]) == math.prod(metadata_shape(shape, group_size))


@by_shape
@pytest.mark.parametrize("name", STATE_FORMATS)
def test_every_shape_survives_as_one_group_in_groups_of_five_and_of_one(name, shape):
    for group_size in (1, 5, None):
        for codec in codecs(name, group_size):
            x = state(codec, *shape)
            x_hat = codec.decode(codec.encode(x), shape)
            assert x_hat.shape == shape
            assert x_hat.isfinite().all()


@by_grouped
def test_without_groups_the_whole_tensor_shares_one_amax(name):
    for codec, alone in zip(codecs(name, None), codecs(name, 6000), strict=True):
        x = state(codec, 20, 3, 100)
        parts, flat = codec.encode(x), alone.encode(x.reshape(-1))
        assert all(part.shape == (1,) for part in parts[1:])
        assert all(bits_equal(a.reshape(-1), b) for a, b in zip(parts, flat, strict=True))


STRIDES = {
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.reshape(13, 10, 130).permute(2, 0, 1),
    "strided": lambda x: x[::2, 1::3],
    "channels last": lambda x: x.reshape(13, 10, 13, 10).to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(3, 130),
    "columns of groups": lambda x: torch.cat([x, x], 1)[:, :256].unflatten(1, (2, 128)),
}


@pytest.mark.parametrize("view", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("name", [*ANYWHERE, "rank1_linear4", "bf16", "fp32"])
def test_strides_do_not_matter(name, view):
    for codec in codecs(name):
        x = view(state(codec, 130, 130))
        parts, expected = codec.encode(x), codec.encode(x.contiguous())
        assert all(bits_equal(a, b) for a, b in zip(parts, expected, strict=True))
        strided = [part.transpose(0, -1).contiguous().transpose(0, -1) for part in parts]
        assert bits_equal(codec.decode(strided, x.shape), codec.decode(expected, x.shape))


# Bits per element, in groups of 128: codes, an FP32 number for each group, and a byte for k.
BITS = dict.fromkeys(("e4m3", "e5m2", "int8", "dynamic_tree", "int8_companded"), 8 + 32 / 128)
BITS |= dict.fromkeys(("e4m3_expanded", "e5m2_expanded"), 8 + 40 / 128)
BITS |= {"dynamic4": 4 + 32 / 128, "linear4": 4 + 32 / 128, "rank1_linear4": 4 + 2 * 32 / 512}
BITS |= {"int4_companded": 4 + 16 / 128, "log4": 4 + 32 / 128, "log2": 2 + 32 / 128, "bf16": 16.0, "fp32": 32.0}


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_bits_per_element_are_the_documented_ones(name):
    for codec in codecs(name):
        parts = codec.encode(state(codec, 512, 512))
        assert sum(part.nbytes for part in parts) * 8 / 512**2 == BITS[name]


def test_m_and_v_in_four_bits_take_8_375():
    shape = (256, 256)
    assert sum(state_bytes(name, shape, signed=name != "log4") for name in ALIASES["4bit_log"]) * 8 / 256**2 == 8.375


def test_m_and_v_with_expansion_take_16_625_bits():
    shape = (256, 256)
    stored = [part for signed in (True, False) for part in Expanded(signed).encode(torch.rand(shape))]
    assert sum(part.nbytes for part in stored) * 8 / math.prod(shape) == 16.625


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_codecs_go_by_their_names_and_are_values(name):
    for codec, same in zip(codecs(name), codecs(name), strict=True):
        assert codec.name == name
        assert codec == same and hash(codec) == hash(same)


@pytest.mark.parametrize(
    ("name", "signed", "cure"),
    [
        ("fp7", True, "there are"),
        ("linear4", True, "such as exp_avg: one of .*dynamic4"),
        ("rank1_linear4", True, "exp_avg"),
        ("dynamic4", False, "linear4"),
        ("int4_companded", False, "log4"),
        ("log4", True, "exp_avg"),
        ("log2", True, "exp_avg"),
    ],
)
def test_a_format_that_does_not_fit_is_refused_with_the_cure(name, signed, cure):
    with pytest.raises(ValueError, match=cure):
        state_codec(name, signed=signed)


def test_columns_of_the_full_groups_whatever_a_column_is() -> None:
    """One per element, per group, or per two or four elements; every tail, and rows of 1 to 59 full groups."""
    for groups in range(1, 60):
        for tail in range(1, GROUP):
            full, length = groups * GROUP, groups * GROUP + tail
            assert columns_within((length + 3) // 4, full, length) == full // 4
            assert columns_within(length, full, length) == full
            assert columns_within(groups + 1, full, length) == groups
            assert columns_within((length + 1) // 2, full, length) == full // 2


CODECS = [
    pytest.param(state_codec(name, signed=signed), id=f"{name}, {'signed' if signed else 'never negative'}")
    for name in STATE_FORMATS
    for signed in (True, False)
    if name not in (UNSIGNED_ONLY if signed else SIGNED_ONLY)
]


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_are_encoded_without_computing_them(codec: StateCodec) -> None:
    shapes: list[tuple[int, ...]] = [(4, 256), (3, 208), (5, 24), (7,), (300,), (6, 2, 3, 3), (), (0,), (0, 128)]
    for shape in shapes:
        made = encoded_zeros(codec, shape, torch.device("cpu"))
        expected = codec.encode(torch.zeros(shape))
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in expected]
        assert all(bits_equal(a, b) for a, b in zip(made, expected, strict=True))
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in made), "no padding is kept"
