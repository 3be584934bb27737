"""Collectives that carry codes, on real ranks: within the codec's bound of the plain ones, the same bits on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile.fx.wire import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Wire
from fp8compile.numerics import GroupwiseBest
from tests.support.ranks import on_ranks

GROUP_SIZE = 32
# The squared error of a group is at most E4M3's, which is off by 1/16 of each element, or, of the smallest elements, by a
# step of 2**-10 / 448 of the group's largest: less than 2**-18 in each.
STEP = 1 / 16 + 2**-18 * GROUP_SIZE**0.5
SHAPES = {ALL_GATHER: (5, 77), REDUCE_SCATTER: (6, 77), ALL_REDUCE: (5, 77)}


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return (x * 2.0 ** (torch.arange(x.numel()).reshape(shape) % 23 - 11)).to(dtype)


def exchanged(operation: str, dtype: torch.dtype, mean: bool) -> tuple[Any, torch.dtype]:
    """What this rank gets, in FP64 as an array, since a tensor would need its process to live on; and its dtype."""
    name, rank = dist.group.WORLD.group_name, dist.get_rank()  # type: ignore[union-attr]
    codec = GroupwiseBest(GROUP_SIZE)
    wire = Wire(operation, SHAPES[operation], dtype, dist.get_world_size(), name, mean, codec)
    got = wire.end(wire.begin(given(rank, wire.shape, dtype)))
    return got.double().numpy(), got.dtype


@functools.cache
def results(world: int, operation: str, dtype: torch.dtype, mean: bool) -> list[Tensor]:
    found = on_ranks(world, exchanged, operation, dtype, mean)
    assert all(made == dtype for _, made in found)
    return [torch.from_numpy(array) for array, _ in found]


def expected(world: int, operation: str, dtype: torch.dtype, mean: bool) -> list[Tensor]:
    """In FP64, for each rank."""
    values = [given(rank, SHAPES[operation], dtype).double() for rank in range(world)]
    if operation == ALL_GATHER:
        return [torch.cat(values)] * world
    total = torch.stack(values).sum(0) / (world if mean else 1)
    return list(total.chunk(world)) if operation == REDUCE_SCATTER else [total] * world


def bound(world: int, operation: str, dtype: torch.dtype, mean: bool) -> float:
    """Of the norm of all ranks' errors: of the codes of each rank's values, of those of the sum, of the result's dtype."""
    norms = [given(rank, SHAPES[operation], dtype).double().norm().item() for rank in range(world)]
    if operation == ALL_GATHER:  # each rank has all of them
        return float((world * sum(n**2 for n in norms)) ** 0.5 * (STEP + torch.finfo(dtype).eps))
    of_sum = STEP * sum(norms) / (world if mean else 1)
    if operation == REDUCE_SCATTER:
        return of_sum + 2 * sum(norms) * torch.finfo(dtype).eps
    total = expected(world, operation, dtype, mean)[0].norm().item()
    return float(world**0.5 * (of_sum + STEP * (total + of_sum) + 2 * sum(norms) * torch.finfo(dtype).eps))


@pytest.mark.parametrize(
    ("world", "operation", "dtype", "mean"),
    [
        (2, ALL_GATHER, torch.bfloat16, False),
        (2, REDUCE_SCATTER, torch.float32, False),
        (3, ALL_REDUCE, torch.bfloat16, True),
        *(
            pytest.param(3, operation, dtype, mean, marks=pytest.mark.sweep)
            for operation, mean in ((ALL_GATHER, False), (REDUCE_SCATTER, True), (ALL_REDUCE, False))
            for dtype in (torch.float16, torch.float32)
        ),
    ],
)
def test_results_are_those_of_the_plain_collective(
    world: int, operation: str, dtype: torch.dtype, mean: bool
) -> None:
    case = world, operation, dtype, mean
    got, wanted = results(*case), expected(*case)
    for mine, exact in zip(got, wanted, strict=True):
        assert mine.shape == exact.shape
    errors = torch.stack([mine - exact for mine, exact in zip(got, wanted, strict=True)])
    assert 0 < errors.norm() <= bound(*case)
    if operation == ALL_REDUCE:
        assert all(torch.equal(mine, got[0]) for mine in got), "every rank decodes the same codes"


def test_what_is_sent_is_half_of_sixteen_bit() -> None:
    for operation in SHAPES:
        wire = Wire(operation, (4096, 1024), torch.bfloat16, 8, "0")
        assert wire.sent / wire.sent_plain == (1 + 2 / 128) / 2


def test_rows_that_do_not_fill_their_groups() -> None:
    wire = Wire(REDUCE_SCATTER, (6, 77), torch.bfloat16, 3, "0", codec=GroupwiseBest(GROUP_SIZE))
    assert (wire.row, wire.encoded, wire.bytes_of_row) == (154, 160, 160 + 2 * 5)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    """A loss scaler sees overflow by what is not finite: the whole group is NaN then."""
    wire = Wire(ALL_GATHER, (1, 64), torch.float16, 1, "0", codec=GroupwiseBest(GROUP_SIZE))
    x = torch.ones(1, 64, dtype=torch.float16)
    x[0, 3] = bad
    decoded = wire._unpacked(wire._packed(x))
    assert decoded[0, :32].isnan().all() and (decoded[0, 32:] - 1).abs().max() <= STEP
