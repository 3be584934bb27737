"""Which values of a joint graph are worth watching: those that a product, a convolution or attention makes or takes.

Inductor computes whole kernels in FP32; what can overflow FP16 is what is *stored*. Stored for sure are the operands and
results of products, convolutions and attention, whose kernels are not generated; results of reductions; gradients of
parameters; and the data that comes in. What lies between them is inside a kernel, or reaches one of them next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import torch_private as private
from fp8compile.context import Context
from fp8compile.flow import CASTS, Source, is_tangent, sources
from fp8compile.graph import SPLICED, is_tensor, is_view, module_path, op_name, source_line, storage_root
from fp8compile.report import Origin

aten = torch.ops.aten

# Recipe.observe: the dtypes whose values are watched.
OBSERVED: Mapping[str | bool, tuple[torch.dtype, ...]] = {
    "auto": (torch.float16,),
    True: (torch.float16, torch.bfloat16, torch.float32),
    False: (),
}

WEIGHT, ACTIVATION, DATA = "weight", "activation", "data"
FORWARD, BACKWARD = "forward", "backward"

_CONTRACTIONS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "convolution_backward")
_REDUCTIONS = (
    "sum",
    "mean",
    "prod",
    "cumsum",
    "cumprod",
    "norm",
    "linalg_vector_norm",
    "var",
    "index_put",
    "scatter_add",
)


@dataclass(frozen=True)
class Value:
    """A value to watch: ``node``, what it is, and where it comes from (of a parameter's gradient, the parameter)."""

    node: Node
    kind: str
    direction: str
    origin: Origin


def observable(graph: Graph, ctx: Context) -> list[Value]:
    """The values to watch, in graph order, each storage once."""
    found = sources(graph, ctx.parameters_of(graph))
    weights = _gradients_of_parameters(graph, ctx)
    values: dict[Node, Value] = {}
    for node in graph.nodes:
        for each in _watched(node):
            root = storage_root(each)
            if root not in values and _may_be(root, found[root]) and _dtype_is_observed(root, ctx):
                values[root] = _value(root, found[root], weights)
    position = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(values.values(), key=lambda v: position[v.node])


def _watched(node: Node) -> Iterator[Node]:
    """What one node makes us look at: its results and operands, itself, or the gradients that the graph returns."""
    if node.op == "placeholder":
        yield node
    elif node.op == "output":
        yield from (n for n in node.all_input_nodes if is_tensor(n) and "autograd_backward" in storage_root(n).meta)
    elif _contracts(node):
        yield from (node, *(u for u in node.users if u.target is private.getitem), *node.all_input_nodes)
    elif getattr(node.target, "_opname", "") in _REDUCTIONS:
        yield node


def _contracts(node: Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name in _CONTRACTIONS or "attention" in name


def _may_be(root: Node, source: Source) -> bool:
    """Whether a value depends on data or on a gradient; of inputs, whether it is data or an incoming gradient."""
    if not is_tensor(root) or SPLICED in root.meta:
        return False
    if root.op == "placeholder":
        return source == Source.DATA or is_tangent(root)
    return bool(source & (Source.DATA | Source.GRADIENT | Source.INTEGER))


def _dtype_is_observed(root: Node, ctx: Context) -> bool:
    value = root.meta["val"]
    recipe = ctx.recipe_at(module_path(root))
    return isinstance(value, Tensor) and value.dtype in OBSERVED[recipe.observe]


def _value(root: Node, source: Source, weights: dict[Node, str]) -> Value:
    where = Origin(op_name(root), module_path(root), source_line(root))
    if root in weights:
        return Value(root, WEIGHT, BACKWARD, Origin(where.op, weights[root], where.source))
    if Source.GRADIENT in source:
        return Value(root, ACTIVATION, BACKWARD, where)
    return Value(root, DATA if root.op == "placeholder" else ACTIVATION, FORWARD, where)


def _gradients_of_parameters(graph: Graph, ctx: Context) -> dict[Node, str]:
    """The values that are gradients of parameters, but for views and casts, with the parameters' paths."""
    out = graph.output_node()
    outputs: Any = out.args[0]
    names = dict(ctx.extra.names) if ctx.extra else {}
    found = {}
    for desc, node in zip(out.meta.get("desc") or (), outputs, strict=False):
        of = getattr(desc, "grad_of", None)
        if isinstance(node, Node) and getattr(of, "idx", None) in names:
            found[storage_root(node)] = found[_stored(node)] = names[of.idx]
    return found


def _stored(node: Node) -> Node:
    """What a value is a view or a cast of."""
    while is_view(node) or node.target in CASTS:
        parent = node.args[0]
        if not isinstance(parent, Node):
            break
        node = parent
    return node
