"""Extra inputs of a compiled graph: statistics come out through them, and changing numbers go in, without side effects.

    statistics  [rows, 7] float64, requires grad, read by nothing: its *gradient* is whatever a pass makes it
    limit       0-d float32: what FP16 gradients are clipped to, inf for no clipping

On a copy of the Dynamo graph the two become placeholders after the others. AOTAutograd then has an input without a gradient,
for which the joint graph returns ``None``. A pass puts the statistics there (passes/observe_gradients.py), and autograd
delivers them to ``.grad``, once for each backward: no mutation, no custom operator, nothing for a cache to refuse. The
compiled code is shared by all modules of the same code, so the tensors belong to the call: one set for each set of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from fp8compile.fx.extra_inputs import ByParameters, with_inputs
from fp8compile.fx.provenance import parameters_of
from fp8compile.observe.records import StatisticsRow, StatsSlot
from fp8compile.observe.selection import OBSERVED
from fp8compile.recipe.context import StatsInputs
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport

STATISTICS, LIMIT = "fp8compile_statistics", "fp8compile_limit"
SPARE = 64  # rows for calls that become many operations, such as multi-head attention: 3.5 KiB


def with_slot(
    gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe
) -> tuple[GraphModule, Sequence[Any], StatsInputs | None]:
    """A copy of the graph with the extra inputs, if the recipe observes anything in it; else the graph as it was."""
    if not _observes(gm, example_inputs, recipe):
        return gm, example_inputs, None
    rows = 4 * calls_of(gm) + len(example_inputs) + SPARE
    inputs = StatsInputs(len(example_inputs), rows, parameters_of(gm, example_inputs))
    slot = StatsSlot({}, inputs.rows, device_of(example_inputs))
    return (*with_inputs(gm, example_inputs, {STATISTICS: slot.values, LIMIT: slot.limit}), inputs)


def _observes(gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe) -> bool:
    """Whether a backward will run, and some value in the graph has a dtype that the recipe observes."""
    dtypes = {dtype for each in (recipe, *recipe.modules.values()) for dtype in OBSERVED[each.fp32.observe]}
    trains = any(isinstance(v, Tensor) and v.requires_grad for v in example_inputs)
    if not (dtypes and trains and torch.is_grad_enabled()):
        return False
    values = (node.meta.get("example_value") for each in _nested(gm) for node in each.graph.nodes)
    return any(isinstance(v, Tensor) and v.dtype in dtypes for v in (*values, *example_inputs))


def _nested(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and those that its higher-order operators run, for example the bodies of activation checkpoints."""
    return (each for each in gm.modules() if isinstance(each, GraphModule))


def calls_of(gm: GraphModule) -> int:
    """How many operations the graph runs, nested ones as often as they are called."""
    total = 0
    for node in gm.graph.nodes:
        if node.op.startswith("call"):
            bodies = [getattr(gm, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
            total += 1 + sum(calls_of(body) for body in bodies if isinstance(body, GraphModule))
    return total


def device_of(example_inputs: Iterable[Any]) -> torch.device:
    return next(v.device for v in example_inputs if isinstance(v, Tensor) and v.requires_grad)


def rows_of(reports: Iterable[GraphReport]) -> dict[int, StatisticsRow]:
    """By row, what a graph's statistics are about, in the order in which the graph computes the values."""
    seen = sorted((o for report in reports for o in report.notes.observed), key=lambda o: o.order)
    return {
        o.row: StatisticsRow(o.origin.module, o.origin.source, o.origin.op, o.kind, o.direction, o.dtype)
        for o in seen
    }


class WithStatsInputs:
    """A compiled graph that adds its extra inputs to each call: those of the parameters it is called with.

    ``registered(parameters)`` gives those that modules and optimizers hold, by which observations are found.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        inputs: StatsInputs,
        rows: Mapping[int, StatisticsRow],
        example_inputs: Sequence[Any],
        registered: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        self.compiled = compiled
        names = [name for _, name in inputs.names]
        device = device_of(example_inputs)

        def slot(parameters: Sequence[Tensor]) -> StatsSlot:
            return StatsSlot(rows, inputs.rows, device, registered(parameters), names)

        self.slots = ByParameters([i for i, v in enumerate(example_inputs) if isinstance(v, Parameter)], slot)

    def __call__(self, *args: Any) -> Any:
        slot = self.slots.of(args)
        return self.compiled(*args, slot.values, slot.limit)
