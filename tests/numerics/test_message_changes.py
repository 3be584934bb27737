"""Changes of a sample's activation: how far what is received may be from it, that errors are not carried on; agreement."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fp8compile.numerics.few_bits import BITS, FewBits
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.message_changes import change, checksum, moved, started
from fp8compile.numerics.wire_codes import WireCode

KEPT = (torch.bfloat16, torch.float16)
HALF_ULP = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
}  # relative, of what is rounded; doubled: of what it became
GROUP = 8


def visit(a: Tensor, m: Tensor, bits: int, group_size: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """What is received, m, and the step of each element's group."""
    code = WireCode(bits, group_size)
    change_ = change(a, m)
    received, m = moved(m, code.unpacked(code.packed(change_), a.shape, torch.float32, torch.float32))
    step = FewBits(bits, group_size).encode(change_)[1].double().reshape(-1)
    return received, m, step.repeat_interleave(group_size)[: a.numel()].reshape(a.shape)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", KEPT, ids=str)
def test_what_is_received_is_within_half_a_step_of_the_change(bits: int, dtype: torch.dtype) -> None:
    """Every a of a grid beside every m of another, in all places of a group: every pair of ends that groups can have."""
    grid = torch.tensor([-3.0, -1.5, -0.7, -(2.0**-8), 0.0, 0.33, 1.0, 2.9])
    rows = [torch.cat([grid.roll(i)[:4], grid.roll(j)[:4]]) for i, j in itertools.product(range(8), repeat=2)]
    a_NG = torch.stack(rows).repeat(8, 1)
    m_NG = torch.stack([grid.roll(k) for k in range(8)]).repeat_interleave(64, 0).to(dtype)
    received, m, step = visit(a_NG, m_NG, bits)
    bound = step * (0.5 + 2.0**-13) + 2 * HALF_ULP[dtype] * received.double().abs() + 2.0**-20
    assert ((received.double() - a_NG.double()).abs() <= bound).all()
    span = (change(a_NG, m_NG).amax(1) - change(a_NG, m_NG).amin(1)).double()
    widest = (span + 2.0**-7 * change(a_NG, m_NG).amin(1).abs()) / (2**bits - 1) * (1 + 2.0**-7)
    assert (step[:, 0] <= widest).all() and torch.equal(received, m)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", KEPT, ids=str)
def test_of_an_activation_that_stands_still_the_error_falls_by_a_step_with_every_visit(
    bits: int, dtype: torch.dtype
) -> None:
    """E, the largest error before, makes a range of 2 E; half a step of it is E / (2**bits - 1), by BF16's roundings of step
    and least at most (1 + 2**-8)(1 + 2**-7) of that. To it comes m's rounding."""
    a = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    m = torch.zeros_like(a, dtype=dtype)
    floor = 2 * HALF_ULP[dtype] * float(a.abs().max())
    start = error = float((a - m).abs().max())
    for _ in range(8):
        _, m, _ = visit(a, m, bits, 32)
        now = float((a.double() - m.double()).abs().max())
        assert now <= error * (1 + 2.0**-8) * (1 + 2.0**-7) * (1 + 2.0**-12) / (2**bits - 1) + floor
        error = now
    factor = 1.02 / (2**bits - 1)
    assert error <= floor / (1 - factor) + start * factor**8 < start / 50, (
        "the roundings of m, and what eight visits left"
    )


@pytest.mark.parametrize("bits", BITS)
def test_changes_are_right_on_average(bits: int) -> None:
    """The error is uniform in half a step: its mean over n groups is within five of its deviations, and m's rounding."""
    groups = 20_000
    a = torch.tensor([0.1, 0.2, 0.35, -0.3, 0.05, 0.22, -0.11, 0.4]).repeat(groups, 1)
    received, _, step = visit(a, torch.zeros_like(a, dtype=torch.float16), bits)
    error = (received.double() - a.double()).mean(0)
    deviation = float(step.max()) * math.sqrt(1 / 12 / groups)
    assert float(error.abs().max()) < 5 * deviation + 2.0**-13 * float(step.max()) + 2.0**-13


def test_a_small_change_is_received_better_than_the_activation_itself() -> None:
    """By what the change is smaller: 40 dB here, where m's own rounding does not hide it."""
    random = torch.Generator().manual_seed(4)
    m = torch.randn(64, 128, generator=random).half()
    a = m.float() + 0.01 * torch.randn(64, 128, generator=random)
    code, error = WireCode(3), {}
    error["direct"] = float((code.unpacked(code.packed(a), a.shape, a.dtype, a.dtype) - a).norm())
    error["changes"] = float((visit(a, m, 3, 128)[0].float() - a).norm())
    assert error["changes"] < error["direct"] / 75, "100 but for m's rounding and BF16's of step and least"


@pytest.mark.parametrize("dtype", KEPT, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_overflow_is_received_and_not_remembered(dtype: torch.dtype, value: float) -> None:
    a = torch.randn(2, GROUP, generator=torch.Generator().manual_seed(5))
    m = a.to(dtype) * 0.5
    a[0, 3] = value
    received, after, _ = visit(a, m, 4)
    assert received[0].isnan().all() and torch.equal(after[0], m[0])
    assert torch.equal(received[1], after[1]) and not torch.equal(after[1], m[1])
    first = started(a, dtype)
    assert first[0, 3] == 0 and torch.equal(first[1], a[1].to(dtype)) and first.dtype == dtype


def test_fp16_does_not_overflow_by_a_code() -> None:
    """A change that ends at FP16's largest number may be decoded above it."""
    m = torch.full((1, GROUP), 65000.0).half()
    received, after = moved(m, torch.full((1, GROUP), 600.0))
    assert (received == FP16_MAX).all() and torch.equal(received, after)
    assert (moved(-m, torch.full((1, GROUP), -600.0))[0] == -FP16_MAX).all()


def test_a_checksum_sees_every_bit_and_place_and_whose_rows_they_are() -> None:
    m = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(6)).bfloat16()
    ids = [11, 4, 7]
    known = int(checksum(m, ids))
    assert int(checksum(m.clone(), ids)) == known
    others = {int(checksum(m.flip(i), ids)) for i in range(3)}
    others |= {int(checksum(m, list(each))) for each in itertools.permutations(ids) if list(each) != ids}
    for place, bit in itertools.product(range(m.numel()), range(16)):
        changed = m.clone()
        changed.view(-1).view(torch.int16)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
        others.add(int(checksum(changed, ids)))
    assert known not in others and len(others) == 3 + 5 + m.numel() * 16
