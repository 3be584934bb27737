"""encode_saved on masks: bits, exactly; where they stay bytes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.support import exactly
from tests.support.exactly import report_of
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled


class Chosen(nn.Module):
    """A mask that no seed makes again, and that the gradient is multiplied with."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.where(h.cumsum(0) > 0, h, 0.1 * h))


class Dropped(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5))


class Given(Chosen):
    """The caller's own mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(torch.where(mask, self.a(x), 0.0))


class InImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.where(h.cumsum(0) > 0, h, 0.1 * h))


masks = functools.partial(exactly.stored, dtype="bool")
left = functools.partial(exactly.left, dtype="bool")


def test_golden_how_bits_are_read() -> None:
    split = split_of(Chosen(), torch.randn(128, 64), linears="off", **{"saved.min_numel": 0})
    lines = backward_of(split).splitlines()
    of_masks = [line for line in lines if line.startswith(("gt", "ne", "where"))]
    assert_expected_inline(
        "\n".join(of_masks),
        """\
gt_codes: int16[512]
where_codes: int8[128, 64]
where_inv_scale: bfloat16[128, 1]
ne: bool[128, 64] = decode(gt_codes)
where_1: float32[128, 64] = where(ne, full_default, mm)
where_2: float32[128, 64] = where(ne, mm, full_default)""",
    )


@pytest.mark.parametrize("rows", [128, 13])
def test_a_mask_takes_a_bit_an_element(rows: int) -> None:
    found = masks(report_of(Chosen(), torch.randn(rows, 64)))
    assert found == [("bits", rows * 64, rows * 8)]


def test_an_odd_number_of_elements_is_filled_up() -> None:
    found = masks(report_of(Chosen(5), torch.randn(3, 5)))
    assert found == [("bits", 15, 2)]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("model", [Chosen(), Dropped(), InImages().to(memory_format=torch.channels_last)])
def test_gradients_are_the_same_to_the_bit(model: nn.Module, codegen: str) -> None:
    """The gradients that read masks and no codes: of biases."""
    x = torch.randn(64, 64)
    if isinstance(model, InImages):
        x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    found = []
    for disabled in ("", "encode_saved"):
        twin = copy.deepcopy(model)
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=disabled):
            fn = compiled(twin, linears="off", **{"saved.min_numel": 0, "debug.codegen": codegen})
            torch.manual_seed(0)
            fn(x).square().mean().backward()
        found.append([p.grad for p in twin.parameters()])
    biases = [(a, b) for a, b in zip(*found, strict=True) if a.dim() == 1]
    assert biases and all(torch.equal(a, b) for a, b in biases)


def test_a_mask_in_channels_last_keeps_its_order() -> None:
    model = InImages().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert masks(report_of(model, x)) == [("bits", 2048, 256)]


# ------------------------------------------------------------------------------------------------ where it declines


def test_a_small_mask_stays() -> None:
    report = report_of(Chosen(), torch.randn(8, 64), **{"saved.min_numel": 4096})
    assert not masks(report) and left(report) == ["fewer than 4096 elements"]


def test_a_mask_of_symbolic_size_stays_with_the_cure() -> None:
    report = report_of(Chosen(), torch.randn(96, 64), dynamic=True)
    assert not masks(report) and "dynamic=False" in left(report)[0]


def test_the_callers_mask_is_his() -> None:
    report = report_of(Given(), torch.randn(64, 64), torch.rand(64, 64) < 0.5)
    assert not masks(report) and not left(report)


def test_what_the_recipe_skips_stays() -> None:
    report = report_of(Chosen(), torch.randn(64, 64), skip=["*"])
    assert not masks(report)


def test_a_mask_that_its_seed_makes_again_is_not_saved() -> None:
    report = report_of(Dropped(), torch.randn(64, 64))
    assert not masks(report) and not left(report)
