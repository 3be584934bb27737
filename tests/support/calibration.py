"""Models to calibrate, and what their calibrations hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.recipe.calibration import CalibratedValue, Calibration

PLAIN = {"preset": "off"}


class Scaled(nn.Module):
    """x * w, then a function of it: every value can be told by hand."""

    def __init__(self, fn: Callable[[Tensor], Tensor] = lambda y: y, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.w, self.fn = nn.Parameter(torch.ones(4, dtype=dtype)), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x * self.w)


def run_options(islands: object, **more: object) -> dict[str, Any]:
    return {**PLAIN, "fp32": islands, **more}


def values(calibration: Calibration, kind: str = "training") -> tuple[CalibratedValue, ...]:
    (graph,) = (g for g in calibration.graphs if g.kind == kind)
    return graph.values


def amax(calibration: Calibration, op: str, direction: str = "forward") -> list[float]:
    return [v.amax for v in values(calibration) if v.op.startswith(op) and v.direction == direction]


def error_of(run: Callable[[], object]) -> str:
    """What the ValueError beneath torch.compile's error says."""
    with pytest.raises(Exception) as caught:
        run()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, ValueError), error
    return str(error)
