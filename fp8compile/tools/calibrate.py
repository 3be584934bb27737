"""``fp8compile.calibrate``: a few steps with every 16-bit value computed in FP32, and how large each of them becomes.

    joint graph  --widen all-->  forward and backward in FP32, run node by node  --statistics-->  amax by node

An overflowing model is measured like a healthy one: nothing saturates on the way, so the first value that leaves FP16's range
does not hide the ones after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.hooks import joint_pass
from fp8compile.compiler.inductor_options import inductor_options
from fp8compile.compiler.node_by_node import boxed, make_runnable
from fp8compile.fx.aot import BACKWARD
from fp8compile.islands.measured import kind_of, measured_nodes, values_of
from fp8compile.islands.upcast import can_widen, widen
from fp8compile.numerics import histogram
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.observe.records import Observations, StatisticsRow
from fp8compile.recipe.calibrated import fp32_fields
from fp8compile.recipe.calibration import CalibratedValue, Calibration, Measurements
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.interpreter import MINUS, NAN, all_finite, nonfinite_kinds, range_of
from fp8compile.tools.trial_step import (
    LIMIT,
    arguments,
    check_is_module,
    chosen_recipe,
    default_loss,
    left_as_it_was,
    named_arguments,
    one_step,
)

ROWS = "fp8compile_lines"  # in the meta of a node: the rows of the statistics that its value goes to
DIGITS = 3  # digits kept of an amax: another machine's rounding must not make another calibration


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    headroom: float = 8.0,
) -> Calibration:
    """Measure which 16-bit values of ``model`` fit FP16: a forward and backward, and an evaluation, for each batch.

    Every 16-bit value, forward and backward, is computed in FP32, node by node. Gradients are judged at the loss scale that
    suits most of them, ``calibration.loss_scale``: only what no single scale fits is unsafe. Gradients that come into a graph
    are as the loss makes them, at scale 1, in their own dtype. Gradients, buffers, random number generators and
    train/eval mode are left as they were; a model that is compiled goes on as it was.

        calibration = fp8compile.calibrate(model, batches, loss=loss)
        calibration.save("calibration.json")
        model = torch.compile(model, backend="fp8compile", options={"islands": "calibration.json"})

    Args:
        model: a module, compiled or not.
        batches: what the model is called with, a few times: each a tensor, a sequence of positional arguments or a mapping of
            keywords. Every path through the model that training takes should be among them.
        recipe: a Recipe, the name of a preset or a dict of fields; by default that of the running model, else the
            default recipe. What it says of FP32 (``fp32.keep``) is kept in the calibration.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs.
        headroom: how many times below 65504, and above 2**-14, a value must stay to fit.

    Raises:
        ValueError: no batches, NaN or inf in one of them, in a parameter or in the loss, NaN in a gradient, no 16-bit values,
            no graph was compiled, ``loss`` is not a scalar, or ``headroom`` is not above 1.
    """
    check_is_module(model, "calibrate")
    if isinstance(batches, (Tensor, Mapping)):
        raise ValueError(
            f"calibrate: batches is a {type(batches).__name__}; give a list of batches, if only of one: [batch]."
        )
    nothing = Calibration((), headroom)  # raises for an invalid headroom
    eager = getattr(model, "_orig_mod", model)
    chosen = chosen_recipe(recipe, model)
    _check_finite("", (*eager.named_parameters(), *eager.named_buffers()))
    graphs = _run(eager, chosen, batches, loss)
    measured = _merged(graph.measurements() for graph in graphs)
    if not measured:
        raise ValueError(
            "calibrate: nothing to calibrate: no graph of this model computes in 16 bit. Calibrate what is trained: "
            "model.half(), or a model under autocast."
        )
    return dataclasses.replace(nothing, graphs=measured, loss_scale=_best_scale(measured), **fp32_fields(chosen))


def _run(
    model: nn.Module, recipe: Recipe, batches: Iterable[Any], loss: Callable[[Any], Tensor] | None
) -> list[_CalibratedGraph]:
    """Train and evaluate on every batch; returns the graphs, with what was seen in them."""
    graphs: list[_CalibratedGraph] = []

    def compile(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(_CalibratedGraph())
        return graphs[-1].compile(gm, example_inputs, recipe)

    number = 0
    with left_as_it_was(model), private.dynamo_config.patch(recompile_limit=LIMIT):
        step = torch.compile(model, backend=compile)
        for number, batch in enumerate(batches, 1):
            args, kwargs = arguments(batch, None, "calibrate")
            where = f"batch {number - 1}, "
            _check_finite(where, named_arguments(args, kwargs))
            gradients = one_step(step, args, kwargs, _finite_loss(where, loss))
            _check_gradients(where, model, gradients)
            with torch.no_grad(), _evaluating(model):
                step(*args, **kwargs)
    if not number:
        raise ValueError("calibrate: no batches. Give one at least, of data like that in training.")
    if not graphs:
        raise ValueError(f"fp8compile.calibrate: {report_store.NO_GRAPH_COMPILED}")
    return graphs


def _check_finite(where: str, tensors: Iterable[tuple[str, Any]]) -> None:
    """Check that there is no NaN and no inf; -inf alone is a mask."""
    for name, value in tensors:
        if not all_finite(value) and nonfinite_kinds(value) != {MINUS}:
            found = range_of(name, value).non_finite
            raise ValueError(
                f"calibrate: {where}{name} holds {found} of {value.numel()}: nothing can be measured with it. "
                f"Leave the batch out, or mend the model."
            )


def _finite_loss(where: str, loss: Callable[[Any], Tensor] | None) -> Callable[[Any], Any]:
    def checked(output: Any) -> Any:
        value = loss(output) if loss else default_loss(output)
        if isinstance(value, Tensor) and not all_finite(value):
            raise ValueError(
                f"calibrate: {where}the loss is {value.tolist()} with the model in FP32: its gradients say nothing. "
                f"fp8compile.tools.debug_step(model.float(), batch) names the operation; an output that does not fit the "
                f"model's dtype is beyond any island."
            )
        return value

    return checked


def _check_gradients(where: str, model: nn.Module, gradients: Iterable[Tensor | None]) -> None:
    """Check that there is no NaN; an inf may come from the cast back to 16 bit at scale 1."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    for name, gradient in zip(trained, gradients, strict=False):
        if gradient is not None and NAN in nonfinite_kinds(gradient):
            raise ValueError(
                f"calibrate: {where}the gradient of {name} holds nan with the model in FP32. "
                f"fp8compile.tools.debug_step(model.float(), batch) names the operation."
            )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode; each of its modules is afterwards as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _CalibratedGraph:
    """One Dynamo graph: widened as a whole, run node by node; ``observations`` hold what was seen of it."""

    def __init__(self) -> None:
        self.kind = ""
        self.values: list[CalibratedValue] = []

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe) -> Callable[..., Any]:
        patches = inductor_options(recipe)
        patches |= {"force_disable_caches": True, **joint_pass(self.widen, patches)}
        compile_args: dict[str, Any] = {"config_patches": patches, "inner_compile": self.inner}
        with private.functorch_config.patch(cse=False):  # so that two equal values are measured separately
            return cast(Callable[..., Any], private.compile_fx(gm, example_inputs, **compile_args))

    def widen(self, graph: Graph) -> None:
        """Widen the joint or inference graph. Nested regions come before the graph that holds them, which comes last."""
        nodes = measured_nodes(graph)
        self.kind, self.values = kind_of(graph), values_of(graph, nodes)
        wide = widen(graph, {n for n in graph.nodes if can_widen(n)})
        for row, node in enumerate(nodes):
            meta = wide[node].meta
            meta[ROWS] = (*meta.get(ROWS, ()), row)

    @functools.cached_property
    def observations(self) -> Observations:
        """What was seen, a row for each of ``values``. Made when the graph first runs: at compilation tensors are fake."""
        rows = [StatisticsRow(v.module, v.source, v.op, "activation", v.direction, v.dtype) for v in self.values]
        return Observations(rows, torch.device("cpu"))

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Inductor's inner compiler: called once for the forward graph and once for the backward graph."""
        make_runnable(gm)

        def run(*values: Any) -> Any:
            measuring = _StatisticsRun(gm, len(self.values))
            result = measuring.run(*values)
            self.observations.add(measuring.stats)
            return result

        return boxed(run)

    def measurements(self) -> Measurements:
        amax = self.observations.current[:, histogram.AMAX].tolist()
        rounded = (float(f"{each:.{DIGITS}g}") for each in amax)
        pairs = zip(self.values, rounded, strict=True)
        return Measurements(self.kind, tuple(dataclasses.replace(value, amax=each) for value, each in pairs))


class _StatisticsRun(Interpreter):
    """Runs one half of a graph; afterwards ``stats`` hold the statistics of the nodes with ``ROWS``."""

    def __init__(self, gm: GraphModule, num_rows: int) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.stats = torch.zeros(num_rows, len(histogram.COLUMNS), dtype=torch.float64)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if rows := n.meta.get(ROWS):
            self.stats[list(rows)] = histogram.statistics(_without_masks(result)).to(self.stats.device)
        return result


def _without_masks(x: Tensor) -> Tensor:
    """``x`` with -inf for elements within 1 % of -65504: those are a mask with scores added to it. This hides no overflow,
    since a value that comes this near from either side does not fit."""
    return x.detach().masked_fill((x / -FP16_MAX - 1).abs() < 0.01, -torch.inf)


def _best_scale(graphs: Iterable[Measurements]) -> float:
    """The power of two that brings the median amax of all gradients nearest 1; 1 where there are no gradients."""
    amax = [v.amax for g in graphs for v in g.values if v.direction == BACKWARD and v.amax > 0]
    return 2.0 ** -round(math.log2(statistics.median(amax))) if amax else 1.0


def _merged(graphs: Iterable[Measurements]) -> tuple[Measurements, ...]:
    """The graphs that hold values. Graphs with the same kind and keys are merged, with the larger amax of each value."""
    found: dict[tuple[Any, ...], Measurements] = {}
    for graph in graphs:
        key = graph.kind, graph.keys
        if not graph.values:
            continue
        if key in found:
            pairs = zip(found[key].values, graph.values, strict=True)
            both = (dataclasses.replace(old, amax=max(old.amax, new.amax)) for old, new in pairs)
            graph = Measurements(graph.kind, tuple(both))
        found[key] = graph
    return tuple(found.values())
