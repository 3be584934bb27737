"""Groups end with their row: no row of 16 to 400 elements changes what another comes back as, in any codec."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, INT8, Groupwise, GroupwiseBest
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.groups import SHORTEST, Groups
from tests.support.codecs import lengths_of_groups, raw_parts

torch.set_num_threads(1)

CODECS: list[Any] = [Groupwise(INT8), Groupwise(E4M3), GroupwiseBest(), Groupwise(INT8, 48), FewBits(4)]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def came_back(codec: Any, x: Tensor) -> Tensor:
    """What is decoded."""
    parts = codec.encode(x)
    shape = (x.shape,) if isinstance(codec, FewBits) else ()
    found: Tensor = codec.decode(*parts, *shape, torch.float32)
    return found


@by_codec
@pytest.mark.parametrize("value", [1e4, 300.0, math.inf, math.nan])
def test_no_row_of_16_to_400_changes_another(codec: Any, value: float) -> None:
    for length in range(SHORTEST, 401):
        x = normal(3, length)
        spoilt = x.clone()
        spoilt[1] *= value
        one, other = came_back(codec, x), came_back(codec, spoilt)
        assert torch.equal(one[0], other[0]) and torch.equal(one[2], other[2]), length


@pytest.mark.parametrize("codec", CODECS[:4], ids=lambda codec: codec.name)
def test_codes_of_a_row_are_those_that_it_has_alone(codec: Any) -> None:
    for length in (16, 17, 64, 127, 129, 192, 197, 256, 320, 400):
        x = normal(5, length)
        codes, inv_scale = codec.encode(x)
        alone = [codec.encode(row) for row in x]
        assert torch.equal(raw_parts(codes), torch.stack([raw_parts(c) for c, _ in alone])), length
        assert torch.equal(inv_scale, torch.cat([s for _, s in alone])), length


@pytest.mark.parametrize("group_size", [16, 64, 128])
def test_codes_of_multiples_are_those_of_the_tensor_as_one_row(group_size: int) -> None:
    """As they were when groups were cut from the whole tensor."""
    for rows, groups in ((1, 1), (3, 1), (7, 2), (2, 9), (5, 86)):
        x = normal(rows, groups * group_size)
        cut = x.reshape(-1, group_size)
        for codec in (Groupwise(INT8, group_size), Groupwise(E4M3, group_size), GroupwiseBest(group_size)):
            (codes, inv_scale), (expected, scale) = codec.encode(x), codec.encode(cut)
            assert torch.equal(raw_parts(codes).reshape(-1), raw_parts(expected).reshape(-1))
            assert torch.equal(inv_scale, scale) and len(scale) == rows * groups
            assert codec.nbytes(x.shape) == x.numel() + 2 * rows * groups
        few = FewBits(4, group_size)
        assert all(torch.equal(a, b) for a, b in zip(few.encode(x), few.encode(cut), strict=True))


def test_short_rows_share_groups() -> None:
    assert Groups(128).count((64, 8)) == 4 and Groups(128).count((64, 2, 8)) == 64
    assert Groups(128).count((2, 64, 3)) == 2 * len(lengths_of_groups((192,), 128))


def test_more_dimensions_may_be_a_row() -> None:
    assert Groups(128, 2).count((2, 256, 8, 64)) == 2 * 256 * 4, "heads of tokens"
    assert Groups(128, 2).count((4, 32, 7, 7)) == 4 * 32 and Groups(128, 2).count((4, 32, 28, 28)) == 4 * 32 * 7


def test_every_group_is_full_or_the_last_of_its_row_and_none_is_too_large() -> None:
    for group_size in (16, 48, 128):
        groups = Groups(group_size)
        for row in range(1, 2000):
            size = groups.size(row)
            count, needed = math.ceil(row / size), math.ceil(row / group_size)
            assert size <= group_size and needed <= count <= needed + math.ceil(needed / 2), "half as many more"
            assert row % size == 0 or size == group_size
