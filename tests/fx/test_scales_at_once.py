"""Scales of several amaxes: generated code has those of the operator, and rounds what it is told to round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.fx.scales_at_once import SCALES_AT_ONCE
from fp8compile.numerics import E4M3, INT8
from fp8compile.numerics.formats import Format

TIE = 1 + 2.0**-8  # halfway between two numbers of BF16: to the even one, below
AMAXES = (0.0, 1.0, TIE, 1 + 3 * 2.0**-8, 1.003, 3.4e38, 1e-45, 7e-39, float("inf"), float("nan"))


@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16], ids=str)
def test_generated_code_has_the_scales_of_the_operator(rounded: torch.dtype, fmt: Format) -> None:
    def scales(amaxes: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = SCALES_AT_ONCE([amax * 1 for amax in amaxes], rounded, fmt.dtype)
        return found

    largest_nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a GPU's: one more bit is its sign
    amaxes = [*map(torch.tensor, AMAXES), largest_nan]
    expected, found = torch.stack(scales(amaxes)), torch.stack(torch.compile(scales, fullgraph=True)(amaxes))
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert found[[8, 9, 10]].isnan().all() and bool(found[5].isnan()) is (rounded == torch.bfloat16)


def test_a_scale_is_that_of_what_is_rounded() -> None:
    one, tie = SCALES_AT_ONCE([torch.tensor(1.0), torch.tensor(TIE)], torch.bfloat16, E4M3.dtype)
    assert one == tie == torch.tensor(1 / 448)
