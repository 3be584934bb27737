"""The numbers of a step by one kernel, on a GPU, in place of one for each operation on a number.

    into [P, n]  <-  numbers of a group, counts of steps [P], one-number states [P]        n numbers of P parameters

How many parameters there are is left open, unless there is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.open_sizes import ROWS, Fakes, Open, Size, TensorLayout
from fp8compile.optim.traced_once import lowered
from fp8compile.optim.traced_once import traced as traced_once

PARAMETERS = Open(ROWS, 1)
TUNED_FOR = 2**9  # parameters
Code = Callable[..., Any]


@dataclass(frozen=True)
class NumbersKey:
    """What code for the numbers of a step depends on.

    Attributes:
        scalars: the captured operations.
        count: how many numbers ``into`` has in a row.
        given: how many numbers a group gives.
        singles: how many one-number states there are.
        strides: of ``counts`` and of the rows of ``into``.
        parameters: how many there are; None leaves that open.
    """

    scalars: str
    count: int
    given: int
    singles: int
    strides: tuple[int, int]
    parameters: int | None
    device: torch.device


_known: dict[NumbersKey, tuple[Code, Fakes]] = {}
_fitting: dict[NumbersKey, Code] = {}  # by the number of parameters


def fill(
    into: Tensor, update: CapturedUpdate, numbers: Tensor, counts: Tensor, singles: Sequence[Tensor]
) -> list[Tensor]:
    """Write the numbers of the step that follows; returns the new one-number states ``[P]``.

    Args:
        into: ``[P, n]``, FP32.
        numbers: the group's, FP64.
        counts: ``[P]``, FP32, the steps that were taken.
        singles: the one-number states, ``[P]``, FP32.
    """
    P, count = into.shape
    strides = counts.stride(0), into.stride(0)
    key = NumbersKey(update.scalars.code, count, len(numbers), len(singles), strides, P, counts.device)
    if key not in _fitting:
        _fitting[key] = _code(update, key)
    return [*_fitting[key](into, numbers, counts, *singles)]


def _code(update: CapturedUpdate, key: NumbersKey) -> Code:
    """Code for any number of parameters, if it fits this one."""
    assert key.parameters is not None
    if key.parameters > 1:
        code, fakes = _of(update, replace(key, parameters=None))
        if fakes.fit([{PARAMETERS: key.parameters}]):
            return functools.partial(code, key.parameters)
    return _of(update, key)[0]


def _of(update: CapturedUpdate, key: NumbersKey) -> tuple[Code, Fakes]:
    if key not in _known:
        graph, flat, fakes = traced(update, key)
        _known[key] = lowered(graph, flat, fakes.mode), fakes
    return _known[key]


def traced(update: CapturedUpdate, key: NumbersKey) -> tuple[torch.fx.GraphModule, list[Any], Fakes]:
    """Its graph, of the number of parameters where that is open, and of tensors; and such a list, of fakes."""
    P: Size = PARAMETERS if key.parameters is None else key.parameters
    fakes, (of_counts, of_rows) = Fakes(), key.strides
    single = TensorLayout((P,), (1,), torch.float32, key.device)
    layouts = {
        "into": TensorLayout((P, key.count), (of_rows, 1), torch.float32, key.device),
        "numbers": TensorLayout((key.given,), (1,), torch.float64, key.device),
        "counts": TensorLayout((P,), (of_counts,), torch.float32, key.device),
        **{f"single {i}": single for i in range(key.singles)},
    }
    tensors = fakes.of(layouts, {PARAMETERS: TUNED_FOR} if key.parameters is None else {})

    def step(*taken: Any) -> list[Tensor]:
        into, numbers, counts, *others = taken[len(fakes.sizes) :]
        singles = dict(zip(update.singles, (each.double() for each in others), strict=True))
        rows, new = update.rows_of_step([*numbers.unbind()], counts.double() + 1, singles)
        into.copy_(in_columns(rows))
        return [each.float() for each in new]

    flat = [*fakes.sizes, *tensors.values()]
    return traced_once(step, flat), flat, fakes


def in_columns(rows: Sequence[Tensor]) -> Tensor:
    """``torch.stack(rows, -1)`` in a form of which Inductor makes one kernel, where a stack would be one for each row."""
    column, found = torch.arange(len(rows), device=rows[0].device), rows[0].unsqueeze(-1)
    for i, row in enumerate(rows[1:], 1):
        found = torch.where(column == i, row.unsqueeze(-1), found)
    return found
