"""A graph run node by node, to find where the first NaN or infinity is made.

A node *makes* a NaN, +inf or -inf if its output holds one and none of its inputs does, scalars among its arguments included:
``full(-inf)``, a mask filled with it and all operations that only pass it on make nothing. In the forward, the lowest number
of a dtype counts as -inf: masks are filled with that too, and scores added to it round to -inf in FP16.

A value made this way is a finding as soon as it leaves the graph, or arithmetic reads it, even if the result is finite
again (1 / inf = 0). It is not a finding if a ``where`` chooses the other side and nothing else reads it: rows that are masked
completely (``_safe_softmax``), or the gradient of a norm at 0. ``nan_to_num`` is no such choice: it hides the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fp8compile.fx.aot import FORWARD
from fp8compile.fx.graph import dtype_text
from fp8compile.fx.ops import is_view
from fp8compile.fx.provenance import module_path, op_name, source_line

aten = torch.ops.aten
NAN, PLUS, MINUS = "nan", "inf", "-inf"


@dataclass(frozen=True)
class TensorSummary:
    """What a tensor held.

    Attributes:
        name: the parameter, the input of the model, or the graph's name of the value.
        dtype: e.g. "f16".
        shape: e.g. "[4, 64]".
        numel: its number of elements.
        min, max: the least and the greatest finite element; NaN where there is none.
        nan, inf, minus_inf: how many elements are NaN, inf and -inf.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    min: float
    max: float
    nan: int = 0
    inf: int = 0
    minus_inf: int = 0

    @property
    def amax(self) -> float:
        """The greatest finite magnitude, 0 where there is none."""
        return 0.0 if math.isnan(self.max) else max(abs(self.min), abs(self.max))

    @property
    def non_finite(self) -> str:
        """``inf in 12, nan in 3``, or "" where all is finite."""
        counts = ((PLUS, self.inf), (MINUS, self.minus_inf), (NAN, self.nan))
        return ", ".join(f"{kind} in {count}" for kind, count in counts if count)


@dataclass(frozen=True)
class NonFiniteNode:
    """A node that made a value that is not finite: its place, its output and its inputs."""

    op: str
    module: str
    source: str
    output: TensorSummary
    inputs: tuple[TensorSummary, ...]


class NonFiniteFinder(Interpreter):
    """Runs a graph node by node; afterwards ``found`` is the first finding, or None.

    Args:
        gm: the graph.
        direction: "forward" or "backward".
        names: the names to give to inputs, by the name of their node, if they differ from it.
    """

    def __init__(self, gm: GraphModule, direction: str, names: Mapping[str, str]) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.direction, self.names = direction, names
        self.labels: dict[Node, str] = {}  # of the computed values
        self.made: dict[Node, NonFiniteNode] = {}  # in the order of the graph
        self.confirmed: set[Node] = set()
        self.carried: dict[Node, frozenset[Node]] = {}  # values that hold something made, and who made it

    @property
    def found(self) -> NonFiniteNode | None:
        return next((made for node, made in self.made.items() if node in self.confirmed), None)

    @property
    def outputs(self) -> dict[str, str]:
        """The names to give to the outputs, by the names that they have as inputs of the backward."""
        return {node.name: self._name(node) for node in self.graph.output_node().all_input_nodes}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self.labels[n] = self._name(n.all_input_nodes[0]) if is_view(n) else _label(n)
        carried = frozenset[Node]().union(*(self.carried.get(parent, frozenset()) for parent in n.all_input_nodes))
        if n.op == "output":
            self.confirmed |= carried
        elif n.op == "call_function" and not str(n.target).startswith(("aten.empty", "aten.new_empty")):
            self._look(n, result, carried)
        return result

    def _look(self, node: Node, result: Any, carried: frozenset[Node]) -> None:
        bad = [t for t in pytree.tree_leaves(result) if not all_finite(t)]
        if bad:
            before = frozenset[str]().union(*map(self._held, self._inputs(node)))
            new = next((t for t in bad if nonfinite_kinds(t) - before), None)
            if new is not None:
                self.made[node] = self._described(node, new)
                carried |= {node}
            self.carried[node] = carried
        elif carried and any(_is_floating(t) for t in pytree.tree_leaves(result)) and not _chooses(node):
            self.confirmed |= carried

    def _name(self, node: Node) -> str:
        return self.labels.get(node, self.names.get(node.name, node.name))

    def _inputs(self, node: Node) -> list[Any]:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return pytree.tree_leaves((args, kwargs))

    def _held(self, value: Any) -> frozenset[str]:
        lowest = self.direction == FORWARD and _is_floating(value) and value.numel() > 0
        if lowest and bool((_readable(value) == torch.finfo(value.dtype).min).any()):
            return nonfinite_kinds(value) | {MINUS}
        return nonfinite_kinds(value)

    def _described(self, node: Node, output: Tensor) -> NonFiniteNode:
        inputs = [(self._name(parent), self.env[parent]) for parent in node.all_input_nodes]
        ranges = tuple(range_of(name, t) for name, value in inputs for t in pytree.tree_leaves(value) if _ranges(t))
        place = _place(node)
        source = source_line(node) or source_line(place)
        return NonFiniteNode(op_name(node), module_path(place), source, range_of(node.name, output), ranges)


def nonfinite_kinds(value: Any) -> frozenset[str]:
    """Which of "nan", "inf" and "-inf" a tensor or a number holds."""
    if isinstance(value, float):
        value = torch.tensor(value)
    if not _is_floating(value):
        return frozenset()
    x = _readable(value)
    kinds = ((NAN, x.isnan()), (PLUS, x == torch.inf), (MINUS, x == -torch.inf))
    return frozenset(kind for kind, where in kinds if bool(where.any()))


def all_finite(value: Any) -> bool:
    """Whether ``value`` is no floating-point tensor, or one without NaN and infinity."""
    return not _is_floating(value) or bool(_readable(value).isfinite().all())


def range_of(name: str, value: Tensor) -> TensorSummary:
    """What ``value`` holds; for complex numbers, in real and imaginary parts."""
    x = _readable(value)
    finite = x[x.isfinite()]
    least, greatest = (finite.min().item(), finite.max().item()) if finite.numel() else (math.nan, math.nan)
    counts = [int(where.sum()) for where in (x.isnan(), x == torch.inf, x == -torch.inf)]
    return TensorSummary(
        name, dtype_text(value), tuple(value.shape), x.numel(), float(least), float(greatest), *counts
    )


def _place(node: Node) -> Node:
    """``node``, or, if it belongs to no module (a sum of gradients), the nearest node before it that does."""
    waiting: Sequence[Node] = [node]
    while waiting:
        if known := next((n for n in waiting if {"nn_module_stack", "fwd_nn_module_stack"} & n.meta.keys()), None):
            return known
        waiting = list(dict.fromkeys(parent for n in waiting for parent in n.all_input_nodes))
    return node


def _label(node: Node) -> str:
    """``gelu_3 of blocks.1``."""
    module = module_path(node)
    return f"{node.name} of {module}" if module else node.name


def _chooses(node: Node) -> bool:
    return node.target is aten.where.self and "nan_to_num" not in str(node.meta.get("original_aten"))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _ranges(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_quantized


def _readable(value: Tensor) -> Tensor:
    """The value's numbers in a dtype that has isnan, comparisons and min on every device."""
    x = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    return x if x.dtype in (torch.float64, torch.float32, torch.int64) else x.float()
