"""A line as soon as a value overflows for the first time; training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8compile.fx.aot import FORWARD
from fp8compile.numerics.histogram import INF, NAN
from fp8compile.observe.history import layers_of
from fp8compile.observe.records import Observations
from fp8compile.observe.text import line_of


def watch_all(several: Sequence[Observations]) -> None:
    """Watch each of them, once."""
    for each in several:
        if not any(isinstance(listener, _OverflowAlert) for listener in each.listeners):
            each.listeners.append(_OverflowAlert(each))


class _OverflowAlert:
    """Prints what overflows in a backward for the first time: the first value in the order of the graph, and how many more.

    An overflow goes through all that follows it, so one line stands for them all. Each row is reported once.
    """

    def __init__(self, observed: Observations) -> None:
        self.reported = set(torch.nonzero(observed.first >= 0).flatten().tolist())

    def __call__(self, observed: Observations) -> None:
        broken = observed.current[:, INF] + observed.current[:, NAN] > 0
        new = sorted(set(torch.nonzero(broken).flatten().tolist()) - self.reported)  # waits for the device
        self.reported.update(new)
        if new:
            rows = observed.rows
            first = min(new, key=lambda index: (rows[index].direction != FORWARD, index))
            more = f" (and in {len(new) - 1} more)" if len(new) > 1 else ""
            print(f"fp8compile: {line_of(layers_of([observed], only=first)[0])}{more}", flush=True)
