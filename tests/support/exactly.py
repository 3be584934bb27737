"""What a report says of saved tensors of one dtype, where all that may be is stored: masks, integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.reporting.report import Report


def report_of(model: nn.Module, *inputs: Tensor, dynamic: bool | None = None, **options: Any) -> Report:
    """The report of a step with storage alone, node by node."""
    torch._dynamo.reset()
    options = {"linears": "off", "saved.min_numel": 0, "debug.codegen": "eager"} | options
    fn = torch.compile(model, backend="fp8compile", options=options, dynamic=dynamic)
    fn(*inputs).square().mean().backward()
    return fp8compile.report(fn)


def stored(report: Report, dtype: str) -> list[tuple[str, int, int]]:
    """Of each that is stored, its codec, and its bytes before and after."""
    return [(e.codec, e.info.nbytes, e.bytes_after) for e in report.saved if e.info.dtype == dtype]


def left(report: Report, dtype: str) -> list[str]:
    """Why each of the others is not."""
    return [skip.reason for skip in report.skips if skip.info.dtype == dtype]
