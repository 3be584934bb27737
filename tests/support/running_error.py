"""The bound that the sensitivity analysis argues with, in numbers: an error for every element of every value of a backward.

    forward, float64 -> saved values -> codes of those that encode_saved would store -> decoded: the error of each element
    backward, float64, once with the saved values (and a bound beside each value) and once with the decoded ones

Operations respond as the lists of ``fp8compile.analysis.sensitivity.responses`` say, and the two gradients must not be
farther apart than the bound. All in float64, so nothing but the codes makes a difference: an entry on the wrong list is a
gradient outside. What is not on the lists must not be reached by an error at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.compiler import inductor
from fp8compile.compiler.seeded_random import draw_from_seeds
from fp8compile.fx.graph import memory_order
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.plan import plan_saved
from fp8compile.saved.stored import Stored
from tests.support.graphs import split_of
from tests.support.magnitudes import Magnitudes
from tests.support.wide import Wide, widened

aten, prims = torch.ops.aten, torch.ops.prims
SLACK = 1e-6  # of float64's rounding in the two backwards, and of the bound's own


@dataclass(frozen=True)
class Outcome:
    """One program.

    Attributes:
        encoded: names of the saved values that are stored as codes.
        exact: those that are not, with the reason.
        excess: of each gradient, the largest |g' - g| beside its bound, element by element; at most 1 if all is sound.
        db: of each gradient, its SQNR.
        share_db: of each gradient, its error beside the size its terms have before they cancel.
        finite: whether all decoded gradients are finite where the exact ones are.
    """

    encoded: tuple[str, ...]
    exact: Mapping[str, str]
    excess: tuple[float, ...]
    db: tuple[float, ...]
    share_db: tuple[float, ...]
    finite: bool

    @property
    def sound(self) -> bool:
        return self.finite and all(each <= 1 for each in self.excess)


def outcome(model: nn.Module, *args: Tensor, **options: Any) -> Outcome:
    """Trace the model's training graph, decide what is stored in one byte, and compare the gradients with their bounds."""
    options = {"saved.min_numel": 0, "saved.group_size": 16, "linears": "off", **options}
    inputs: list[list[Any]] = []
    with mock.patch.object(inductor, "run_the_graph", _recording(inputs)):
        split = split_of(model, *args, disabled="encode_saved", **options)
    for half in (split.fw, split.bw):
        draw_from_seeds(half)
    codecs: dict[Node, Stored] = {}
    exact: dict[str, str] = {}
    for edge, decision in plan_saved(split, Context(Recipe(**options))).decisions:
        if isinstance(decision, Stored):
            codecs |= {} if decision.is_exact else {edge.backward: decision}
        elif decision.reason:
            exact[edge.forward.name] = decision.reason
    saved, forward = _saved(split, inputs[0])
    beside = {node: [forward[n] for n in stored.beside] for node, stored in codecs.items()}
    return _compared(split, saved, codecs, beside, exact)


def _recording(inputs: list[list[Any]]) -> Callable[..., Any]:
    """``inductor.run_the_graph`` that keeps what each graph is called with, as it was before the graph changed any of it."""

    def inner(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        def run(args: list[Any]) -> Any:
            inputs.append([a.detach().clone() if isinstance(a, Tensor) else a for a in args])
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return inner


def _saved(split: PartitionedGraph, inputs: list[Any]) -> tuple[dict[Node, Any], dict[Node, Any]]:
    """What the backward is given, with some gradient of the result, and all values of the forward, in float64."""
    forward = Wide(split.fw, garbage_collect_values=False)
    forward.run(*map(widened, inputs))
    by_node = forward.env
    saved = {edge.backward: by_node[edge.forward] for edge in split.edges}
    generator = torch.Generator().manual_seed(1)
    for node in split.bw.graph.find_nodes(op="placeholder"):
        if node not in saved:
            saved[node] = torch.randn(node.meta["val"].shape, dtype=torch.float64, generator=generator)
    return saved, by_node


def _compared(
    split: PartitionedGraph,
    saved: dict[Node, Any],
    codecs: Mapping[Node, Stored],
    beside: Mapping[Node, list[Tensor]],
    exact: dict[str, str],
) -> Outcome:
    placeholders = split.bw.graph.find_nodes(op="placeholder")
    decoded = {node: saved[node] for node in placeholders}
    decoded |= {node: _decoded(stored, saved[node], beside[node]) for node, stored in codecs.items()}
    bounding = Bounding(split.bw, {node: (decoded[node] - saved[node]).abs() for node in codecs})
    reference = bounding.run(*(saved[node] for node in placeholders))
    found = Wide(split.bw).run(*(decoded[node] for node in placeholders))
    bounds = [bounding.bounds.get(n) for n in split.bw.graph.output_node().args[0]]  # type: ignore[union-attr]
    sizes = Magnitudes(split.bw).sizes_of(*(saved[node] for node in placeholders))
    pairs = [
        (r, f, b, s) for r, f, b, s in zip(reference, found, bounds, sizes, strict=True) if isinstance(r, Tensor)
    ]
    return Outcome(
        tuple(n.name for n in codecs),
        exact,
        tuple(_excess(r, f, b) for r, f, b, _ in pairs),
        tuple(_db(r, r - f) for r, f, _, _ in pairs),
        tuple(_db(r if s is None else s, r - f) for r, f, _, s in pairs),
        all(bool((f.isfinite() | ~r.isfinite()).all()) for r, f, _, _ in pairs),
    )


def _decoded(stored: Stored, x: Tensor, beside: list[Tensor]) -> Tensor:
    order, known = memory_order(x), [each.float() if each.is_floating_point() else each for each in beside]
    statistics = known[: len(stored.about.statistics) if stored.about else 0]
    parts = stored.encode(x.float(), order, *known)
    return stored.decode(parts, order, x.shape, torch.float32, *statistics).double()


def _excess(reference: Tensor, found: Tensor, bound: Tensor | None) -> float:
    """The largest difference beside its bound; the floor is float64's rounding beside the largest gradient."""
    floor = SLACK * float(reference.abs().nan_to_num(0, 0, 0).amax()) + 1e-30 if reference.numel() else 1.0
    limit = floor if bound is None else bound * (1 + SLACK) + floor
    difference = (reference - found).abs().nan_to_num(0.0, torch.inf)
    return float((difference / limit).nan_to_num(0.0).amax()) if reference.numel() else 0.0


def _db(reference: Tensor, error: Tensor) -> float:
    if not error.any():  # beside a gradient of zeros too
        return math.inf
    return float(20 * torch.log10(reference.norm() / error.norm().clamp_min(1e-300)))


class Bounding(Wide):
    """Runs a backward graph in float64 and keeps, for each value that an error reaches, a bound for each element.

    Of a mask the bound says which elements may be the other way round.
    """

    def __init__(self, gm: GraphModule, bounds: Mapping[Node, Tensor]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.bounds: dict[Node, Any] = dict(bounds)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and any(operand in self.bounds for operand in n.all_input_nodes):
            bound = self._bound(n, result)
            if bound is not None:
                self.bounds[n] = bound
        return result

    def _bound(self, n: Node, result: Any) -> Any:
        op = packet(n)
        if op in R.SHAPE_ONLY or (op in R.SHAPE_OPERANDS and n.args[0] not in self.bounds):
            return None
        if n.target is R.getitem:
            return self.bounds[n.args[0]][n.args[1]]  # type: ignore[index]
        if op in R.LOGIC or op in R.COMPARISONS or op in R.STEPS:
            return self._of_step(n, op)
        for operations, rule in (
            (R.CHOICES, self._chosen),
            (R.MOVES | R.JOINS | R.SUMS, self._linear),
            (R.ADDITIONS, self._added),
            (R.PRODUCTS | R.CONTRACTIONS, self._multilinear),
            ({R.DIV}, self._quotient),
            (R.NON_EXPANSIVE | R.CLAMPS, self._no_larger),
            (R.SETTLING | R.PHASES, self._no_steeper),
            ({*R.POLES, R.POW} | R.EXPONENTIALS, self._monotone),
        ):
            if op in operations:
                return rule(n, result)
        raise AssertionError(f"the analysis lets a code reach {n.format_node()}")

    def _of(self, argument: Any) -> Any:
        """The bound of an argument; zeros of an exact one's shape."""
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(self._of, argument))
        if not isinstance(argument, Node):
            return argument
        value = self.env[argument]
        if argument in self.bounds:
            return self.bounds[argument]
        return torch.zeros_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(self._value, argument))
        return self.env[argument] if isinstance(argument, Node) else argument

    def _linear(self, n: Node, result: Any) -> Any:
        """The same on the bounds: the weights of all these sums are positive. What is padded with has no error."""
        args = [self._of(a) for a in n.args]
        if n.target is aten.constant_pad_nd.default:
            args = args[:2]
        if n.target is prims.convert_element_type.default:
            return args[0].double()
        return n.target(*args, **n.kwargs)  # type: ignore[operator]

    def _added(self, n: Node, result: Tensor) -> Tensor:
        bounds = [self._of(a) for a in n.args if isinstance(a, Node)]
        alpha = abs(float(n.kwargs.get("alpha", 1)))  # type: ignore[arg-type]
        total = sum(b * (alpha if i else 1.0) for i, b in enumerate(bounds))
        return torch.as_tensor(total).expand(result.shape)

    def _multilinear(self, n: Node, result: Any) -> Any:
        """f(|a| + e, |b| + e') - f(|a|, |b|): what the products of errors and magnitudes add up to."""

        def magnitude(a: Any, with_error: bool) -> Any:
            value = self._value(a)
            if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
                return value
            if isinstance(value, Tensor) and not value.is_floating_point():
                return value.double().abs() + (self.bounds[a] if with_error else 0) if a in self.bounds else value
            return abs(value) + (self.bounds[a] if with_error and isinstance(a, Node) and a in self.bounds else 0)

        more, less = (n.target(*(magnitude(a, e) for a in n.args), **n.kwargs) for e in (True, False))  # type: ignore[operator]
        return (
            tuple(None if m is None else m - k for m, k in zip(more, less, strict=True))
            if isinstance(more, tuple)
            else more - less
        )

    def _quotient(self, n: Node, result: Tensor) -> Tensor:
        a, b = map(self._value, n.args[:2])
        ea, eb = (self._of(x) if isinstance(x, Node) else 0.0 for x in n.args[:2])
        a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
        left = (b.abs() - eb).clamp_min(0)
        return (a.abs() * eb + b.abs() * ea) / (b.abs() * left)

    def _no_larger(self, n: Node, result: Tensor) -> Tensor:
        bounds = [self._of(a) for a in n.args if isinstance(a, Node)]
        if packet(n) in (aten.amax, aten.amin):
            return aten.amax.default(bounds[0], *n.args[1:])
        return torch.stack([torch.broadcast_to(b, result.shape) for b in bounds]).amax(0)

    def _no_steeper(self, n: Node, result: Tensor) -> Tensor:
        return 1.13 * self._of(n.args[0])

    def _monotone(self, n: Node, result: Tensor) -> Tensor:
        """At the ends of the interval, magnitudes apart for a power; infinite beyond the domain."""
        x, e = self._value(n.args[0]), self._of(n.args[0])
        f = lambda v: n.target(v, *n.args[1:], **n.kwargs)  # type: ignore[operator]  # noqa: E731
        if packet(n) is R.POW and n.args[1] >= 1:  # type: ignore[operator]
            return f(x.abs() + e) - f(x.abs())
        ends = torch.stack([(f(x + e) - result).abs(), (f(x - e) - result).abs()]).nan_to_num(torch.inf, torch.inf)
        pole = R.POLES.get(packet(n), 0.0)
        crosses = (
            (e >= (x - pole).abs()) & (e > 0)
            if packet(n) not in R.EXPONENTIALS
            else torch.zeros_like(x, dtype=torch.bool)
        )
        return torch.where(crosses, torch.inf, ends.amax(0))

    def _of_step(self, n: Node, op: object) -> Tensor:
        if op in R.LOGIC:
            flips = [self._of(a) for a in n.args if isinstance(a, Node) and a in self.bounds]
            return torch.stack(torch.broadcast_tensors(*flips)).amax(0)
        a, b = (self._value(n.args[0]), self._value(n.args[1])) if len(n.args) > 1 else (self._value(n.args[0]), 0.0)
        error = sum(self._of(x) for x in n.args if isinstance(x, Node))
        flips = ((a - b).abs() <= error).double()
        return flips * 2 if op in R.STEPS else flips

    def _chosen(self, n: Node, result: Tensor) -> Tensor:
        mask, a, b = (torch.as_tensor(self._value(x)) for x in n.args)
        ea, eb = (torch.as_tensor(self.bounds.get(x, 0.0), dtype=torch.float64) for x in n.args[1:])  # type: ignore[call-overload]
        chosen = torch.where(mask, ea, eb)
        if n.args[0] not in self.bounds:
            return chosen
        either = (a - b).abs().nan_to_num(torch.inf, torch.inf) + torch.maximum(ea, eb)
        return torch.where(self.bounds[n.args[0]] > 0, either, chosen)  # type: ignore[index]
