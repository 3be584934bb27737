"""Script: lower and assemble the kernels that compute the numbers of an optimizer's step. Prints JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8compile.optim import compiled_numbers, traced_once
from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.step_numbers import ALIGNED, width_of

from . import fake_h100
from .lowering import Lowered, lower_backend, lowering_config
from .measures import measured, print_json

KINDS = ("AdamW", "NAdam", "RAdam")


def lowered(kind: str, parameters: int | None) -> dict[str, Any]:
    """For so many parameters, or for any number of them."""
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(4))], lr=0.1)
    group = optimizer.param_groups[0]
    update = CapturedUpdates(optimizer).of((4,), group)
    count, given = len(update.names) + len(update.bound_names), len(update.numbers(group))
    strides = ALIGNED, width_of(count)
    key = compiled_numbers.NumbersKey(
        update.scalars.code, count, given, len(update.singles), strides, parameters, torch.device("cpu")
    )
    graph, flat, fakes = compiled_numbers.traced(update, key)
    found = Lowered()
    with lowering_config():
        traced_once.lowered(graph, flat, fakes.mode, lower_backend(found))
    return measured(found.only)


def report(names: Sequence[str]) -> dict[str, Any]:
    fake_h100.install()
    return {name: {str(several): lowered(name, several) for several in (None, 1)} for name in names}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or KINDS))
