"""Which layer overflowed first, in which step, in which direction, by how much: read from the observed statistics.

    first = the earliest step; in it the forward before the backward, then the order in which the graphs run

Nothing is measured here. ``fp8compile.observe.records`` holds the statistics, on the device; reading them waits for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fp8compile.observe import records
from fp8compile.observe.alerts import watch_all
from fp8compile.observe.history import ValueHistory, by_severity, first_overflow, layers_of, steps_of
from fp8compile.observe.plots import plot, to_tensorboard
from fp8compile.observe.records import Observations
from fp8compile.observe.text import headline, text_of

SCHEMA = "fp8compile.overflow/1"

NOTHING = (
    'overflow_report found nothing observed for {}. Run a forward and a backward first; compile with backend="fp8compile" '
    "(FP16 graphs are observed as they are, BF16 and FP32 ones with fp32.observe=True), or watch an eager model by "
    "fp8compile.amp.watch(model)"
)


@dataclass(frozen=True)
class OverflowReport:
    """What was observed of a model; ``str()`` is one line that says what overflowed first, then a table.

    Attributes:
        layers: all observed values, in the order in which they run: the forward, then the backward.
        loss_scale: (step, loss scale) from the scaler, if the report was made for one.
    """

    layers: tuple[ValueHistory, ...]
    loss_scale: tuple[tuple[int, float], ...] = ()

    @cached_property
    def first(self) -> ValueHistory | None:
        """The earliest overflow, None if there was none.

        An input that holds inf, but no NaN, is named only if another value overflows for the first time in the same step:
        by itself it may be a mask of -inf.
        """
        return first_overflow(self.layers)

    @property
    def data(self) -> bool:
        """Whether the first NaN or inf came in with the data, so that no layer made it."""
        return self.first is not None and self.first.data

    @property
    def line(self) -> str:
        """Step, module, direction, op, source line and magnitude of the first overflow, or that there was none."""
        return headline(self.layers)

    @property
    def by_severity(self) -> list[ValueHistory]:
        """The layers that overflowed, the earliest first; then the others, the least headroom first."""
        return by_severity(self.layers)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are kept."""
        return steps_of(self.layers)

    def to_json(self) -> str:
        """Everything, with ``line`` as "first"; an infinite headroom is null."""
        data = {
            "schema": SCHEMA,
            "first": self.line if self.first else None,
            "data": self.data,
            "layers": [layer.to_dict() for layer in self.layers],
            "loss_scale": self.loss_scale,
        }
        return json.dumps(data, indent=1)

    def plot(self, folder: str | Path) -> list[Path]:
        """Write ``headroom.png``, layers x steps, and for a scaler ``loss_scale.png``; needs matplotlib."""
        return plot(self.layers, self.loss_scale, Path(folder))

    def to_tensorboard(self, writer: Any, since: int = 0) -> None:
        """Write scalars for all kept steps from ``since`` on: headroom, amax and underflow of each layer, the loss scale.

        Args:
            writer: a ``SummaryWriter``, or a folder, for which tensorboard has to be installed.

        Raises:
            ImportError: ``writer`` is a folder and tensorboard is not installed.
        """
        to_tensorboard(self.layers, self.loss_scale, writer, since)

    def __str__(self) -> str:
        return text_of(self.layers)


def overflow_report(compiled_or_scaler: Any, *, watch: bool = False) -> OverflowReport:
    """What was observed of a running model up to now; training goes on undisturbed.

    Steps are those of the loss scaler if one is in use, else the updates of the optimizer. What was seen since the last one
    belongs to the current step.

    Args:
        compiled_or_scaler: a model that fp8compile compiled or ``fp8compile.amp.watch`` watches, or a loss scaler.
        watch: from now on also print a line as soon as a value overflows for the first time. Every backward then waits for
            the device once per graph.

    Raises:
        ValueError: nothing was observed yet, or it is neither a model nor a scaler.
    """
    several = _observations_of(compiled_or_scaler)
    if watch:
        watch_all(several)
    model = compiled_or_scaler if isinstance(compiled_or_scaler, nn.Module) else None
    scales = getattr(compiled_or_scaler, "history", ()) if model is None else ()
    return OverflowReport(layers_of(several, model), tuple((int(step), float(scale)) for step, scale in scales))


def _observations_of(compiled_or_scaler: Any) -> list[Observations]:
    several: Any = getattr(compiled_or_scaler, "observations", None)
    if isinstance(compiled_or_scaler, nn.Module):
        several = records.of_model(compiled_or_scaler)
    if several is None:
        kind = type(compiled_or_scaler).__name__
        raise ValueError(
            f"overflow_report takes a model or a loss scaler, such as fp8compile.amp.LossScaler, not {kind}"
        )
    if not several:
        raise ValueError(NOTHING.format(f"this {type(compiled_or_scaler).__name__}"))
    return list(several)
