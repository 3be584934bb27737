"""Graphs of one function, and the range of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8compile._torch import make_fx, select_decomp_table
from fp8compile.analysis.ranges import Interval, ranges

SHAPE = (3, 4)
DATA = (-65504.0, 65504.0)


def traced(
    fn: Callable[..., Any], *inputs: tuple[Any, ...], decompositions: bool = False, dtype: torch.dtype = torch.float32
) -> GraphModule:
    examples = [torch.ones(each[2] if len(each) > 2 else SHAPE, dtype=dtype) for each in inputs]
    table = select_decomp_table() if decompositions else {}
    return make_fx(fn, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def analysed(fn: Callable[..., Any], *inputs: tuple[Any, ...], **options: Any) -> tuple[GraphModule, Interval]:
    """The graph of ``fn`` of values within ``inputs``, and the range of its result."""
    gm = traced(fn, *inputs, **options)
    known = {n: Interval(*each[:2]) for n, each in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)}
    result: Any = gm.graph.output_node().args[0]
    assert isinstance(result, Node)
    return gm, ranges(gm.graph, known)[result]


def drawn(lower: float, upper: float, shape: tuple[int, ...] = SHAPE, *, generator: torch.Generator) -> Tensor:
    """Values within the bounds, these among them."""
    kinds = torch.randint(3, shape, generator=generator)
    x = lower + (upper - lower) * torch.rand(shape, generator=generator)
    return torch.where(kinds == 0, lower, torch.where(kinds == 1, upper, x))
