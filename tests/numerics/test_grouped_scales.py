"""grouped_scales: whose rows are whose, scales and places of parts, and what lies behind the last."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3
from fp8compile.numerics.formats import FP8_MULTIPLE
from fp8compile.numerics.grouped_scales import (
    amax_of_parts,
    decode_parts,
    encode_parts,
    experts_of_rows,
    place_parts,
    places_of_parts,
)
from fp8compile.numerics.scaling import inv_scale_of

ROWS, COLUMNS = 40, 8
CASES = {
    "even": [16, 32, 40],
    "ragged": [7, 8, 40],
    "one expert": [40, 40, 40],
    "the last": [0, 0, 40],
    "rows of no one": [5, 5, 33],
    "none at all": [0, 0, 0],
}


def _parts(ends: list[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends]))


def _case(ends: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix, its codes, their scales and each row's expert; what is no one's is NaN."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, COLUMNS) * torch.logspace(-3, 3, COLUMNS)
    x[ends[-1] :] = torch.nan
    expert = experts_of_rows(torch.tensor(ends, dtype=torch.int32), ROWS)
    inv_scale = inv_scale_of(amax_of_parts(x, expert, len(ends)), E4M3)
    return x, encode_parts(x, expert, inv_scale, E4M3), inv_scale, expert


@pytest.mark.parametrize("ends", CASES.values(), ids=CASES)
def test_every_row_is_its_expert_s(ends: list[int]) -> None:
    found = experts_of_rows(torch.tensor(ends, dtype=torch.int32), ROWS)
    for expert, (start, end) in enumerate(_parts(ends)):
        assert (found[start:end] == expert).all()
    assert (found[ends[-1] :] == len(ends)).all()


@pytest.mark.parametrize("ends", CASES.values(), ids=CASES)
def test_scales_are_those_of_each_part_alone(ends: list[int]) -> None:
    x, _, inv_scale, _ = _case(ends)
    for expert, (start, end) in enumerate(_parts(ends)):
        amax = x[start:end].abs().amax(0) if end > start else torch.zeros(COLUMNS)
        torch.testing.assert_close(inv_scale[expert], (amax / E4M3.max).clamp_min(2.0**-126))


@pytest.mark.parametrize("ends", CASES.values(), ids=CASES)
def test_errors_are_within_half_a_step(ends: list[int]) -> None:
    """E4M3: at most 1/16 of the element, or half its smallest number under the scale."""
    x, codes, inv_scale, expert = _case(ends)
    back = decode_parts(codes, inv_scale, expert, torch.float32)[: ends[-1]]
    scale = inv_scale[expert[: ends[-1]].long()]
    bound = torch.maximum(x[: ends[-1]].abs() * E4M3.half_ulp, scale * E4M3.smallest / 2) * (1 + 2**-20)
    assert ((back - x[: ends[-1]]).abs() <= bound).all()


@pytest.mark.parametrize("ends", CASES.values(), ids=CASES)
def test_parts_lie_at_multiples_with_zeros_between(ends: list[int]) -> None:
    _, codes, _, _ = _case(ends)
    row, is_there, behind = places_of_parts(torch.tensor(ends, dtype=torch.int32), ROWS)
    laid = place_parts(codes, row, is_there).t()
    assert laid.shape[1] % FP8_MULTIPLE == 0 and behind[-1] <= laid.shape[1]
    assert is_there.sum() == ends[-1]
    for (start, end), (first, last) in zip(_parts(ends), _parts(behind.tolist()), strict=True):
        assert first % FP8_MULTIPLE == 0 and last - first >= max(end - start, FP8_MULTIPLE)
        assert torch.equal(laid[:, first : first + end - start].float(), codes[start:end].float().t())
        assert not laid[:, first + end - start : last].float().any()


def test_a_value_that_is_not_finite_is_seen_in_its_part_s_column_alone() -> None:
    x = torch.ones(ROWS, COLUMNS)
    x[10, 3], x[30, 5] = torch.inf, torch.nan
    expert = experts_of_rows(torch.tensor([16, 32, 40], dtype=torch.int32), ROWS)
    inv_scale = inv_scale_of(amax_of_parts(x, expert, 3), E4M3)
    codes = encode_parts(x, expert, inv_scale, E4M3)
    lost = decode_parts(codes, inv_scale, expert, torch.float32).isnan()
    expected = torch.zeros_like(lost)
    expected[:16, 3], expected[16:32, 5] = True, True
    assert torch.equal(lost, expected)
