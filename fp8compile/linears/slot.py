"""The extra input that brings scales into a compiled graph, and the calls that add it (delayed scaling).

    scales  [rows, 4] float32, requires grad: a scale for each operand; its gradient is their statistics of this step

On a copy of the Dynamo graph it becomes a placeholder behind the others. A pass reads the scales and returns the statistics
(fp8compile/linears/known_scales.py). Two graphs are made of it: one takes the scales that it is given, the other measures,
so that each operand has a scale of its own, as in current scaling. The first step measures, and so does a step behind one
that clipped too much, or that left an operand without an amax. The graph that measures runs node by node: it is rarely
needed, so no code is generated for it.

Every call has a leaf of its own. Its statistics are taken where the call's own autograd node ends, not where the leaf gets
its gradient: ``torch.autograd.grad`` of chosen tensors runs that node and never reaches the leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from fp8compile import _torch as private
from fp8compile.fx.extra_inputs import ByParameters, taken_at, with_inputs
from fp8compile.fx.provenance import parameters_of
from fp8compile.linears.history import Histories
from fp8compile.numerics.delayed import COLUMNS
from fp8compile.observe.slot import SPARE, calls_of, device_of
from fp8compile.recipe.context import ScaleInput
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import Operand

SCALES = "fp8compile_scales"
OPERANDS = 3  # of a linear: its input, its weight, its gradient


def with_scales(
    gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe
) -> tuple[GraphModule, Sequence[Any], ScaleInput | None]:
    """A copy of the graph with the extra input, if the recipe delays scales and a backward may follow; else as it was."""
    trains = any(isinstance(value, Tensor) and value.requires_grad for value in example_inputs)
    if not (recipe.delays_scales and trains and torch.is_grad_enabled()):
        return gm, example_inputs, None
    rows = 2 * (OPERANDS * calls_of(gm) + SPARE)
    scale_input = ScaleInput(len(example_inputs), rows, True, parameters_of(gm, example_inputs))
    device = device_of(example_inputs)
    scales = torch.zeros(rows, COLUMNS, dtype=torch.float32, device=device, requires_grad=True)
    return (*with_inputs(gm, example_inputs, {SCALES: scales}), scale_input)


def operands_of(reports: Iterable[GraphReport]) -> tuple[Operand, ...]:
    """The operands whose scales a graph takes, in the order of its statistics."""
    return tuple(sorted((o for report in reports for o in report.notes.operands), key=lambda o: o.place))


class WithScales:
    """A compiled graph that is called with the scales of the parameters it is called with.

    ``known`` takes the scales, ``measures`` does not; both return the statistics of ``operands``.
    """

    def __init__(
        self,
        known: Callable[..., Any],
        measures: Callable[..., Any],
        operands: Sequence[Operand],
        scale_input: ScaleInput,
        recipe: Recipe,
        example_inputs: Sequence[Any],
    ) -> None:
        self.known, self.measures, self.operands = known, measures, tuple(operands)
        names, device = [name for _, name in scale_input.names], device_of(example_inputs)

        def made(parameters: Sequence[Tensor]) -> Histories:
            return Histories(operands, scale_input.rows, recipe, device, parameters, names)

        positions = [i for i, value in enumerate(example_inputs) if isinstance(value, Parameter)]
        self.histories = ByParameters(positions, made)

    def __call__(self, *args: Any) -> Any:
        histories = self.histories.of(args)
        if not self.operands:
            return self.known(*args, histories.scales)
        run = self.measures if histories.must_measure() else self.known
        leaf = histories.scales.detach().requires_grad_()
        before = private.producers(args)
        results = run(*args, leaf)
        backward = private.compiled_backward((results, args), before)
        if backward is not None:
            scales = leaf.detach()
            taken_at(backward, leaf, weakref.ref(histories), lambda each, seen: each.add(seen, scales))
        return results
