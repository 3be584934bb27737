"""Which values of a joint graph are worth watching: those that a matmul, a convolution or attention makes or takes.

Inductor computes whole kernels in FP32, so only values that are *stored* can overflow FP16. These are certainly stored: the
operands and results of matmuls, convolutions and attention, whose kernels are not generated; results of reductions; gradients
of parameters; and the data that comes in. A value between them is inside a kernel, or reaches one of them next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.dataflow import Source, is_activation, sources
from fp8compile.analysis.linears import PLAIN_MATMULS, uncast
from fp8compile.fx.aot import BACKWARD, FORWARD, gradients, is_tangent, position
from fp8compile.fx.graph import CLIPPED, SPLICED, is_tensor, storage_root
from fp8compile.fx.ops import ACCUMULATIONS, contracts, is_attention, is_split, is_view, opname
from fp8compile.fx.provenance import Origin, TensorInfo, module_path, op_name, source_line
from fp8compile.numerics.histogram import EDGES
from fp8compile.observe.records import ACTIVATION, DATA, WEIGHT
from fp8compile.recipe.context import Context

aten = torch.ops.aten

# Recipe.fp32.observe: the dtypes whose values are watched.
OBSERVED: Mapping[str | bool, tuple[torch.dtype, ...]] = {
    "auto": (torch.float16,),
    True: tuple(EDGES),
    False: (),
}


OUTPUT = "gradient of an output"


@dataclass(frozen=True)
class ObservedValue:
    """A value to watch: ``node``, what it is, and where it comes from (for a parameter's gradient, the parameter)."""

    node: Node
    kind: str
    direction: str
    origin: Origin

    @property
    def info(self) -> TensorInfo:
        """The facts of it that reports give."""
        return dataclasses.replace(TensorInfo.of(self.node), origin=self.origin)


def observable(graph: Graph, ctx: Context, everything: bool = False) -> list[ObservedValue]:
    """The values to watch, in graph order, each storage once, in the view whose rows are contiguous in memory."""
    found = sources(graph, ctx.parameters_of(graph))
    weights = _gradients_of_parameters(graph, ctx)
    values: dict[Node, ObservedValue] = {}
    inputs = ctx.stats_inputs
    ours = [ctx.input_at(graph, at) for at in (inputs.statistics, inputs.limit)] if inputs else []
    for node in graph.nodes:
        for each in _watched(node, weights):
            root = storage_root(each)
            if root in values or root in ours or ctx.is_own_input(root) or not _may_be(root, found[root]):
                continue
            if not _is_wanted(root, found[root], weights, ctx, everything):
                continue
            values[root] = _value(_in_memory_order(each), root, found[root], weights)
    position = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(values.values(), key=lambda v: position[v.node])


def _watched(node: Node, weights: Iterable[Node]) -> Iterator[Node]:
    """The values to watch because of one node: its results and operands, itself, or the gradients of parameters."""
    if node.op == "placeholder":
        yield node
    elif node.op == "output":
        yield from weights
    elif contracts(node):
        yield from node.all_input_nodes
        if not _is_read_in_another_layout(node):
            yield from (node, *(u for u in node.users if u.target is private.getitem))
    elif opname(node) in ACCUMULATIONS:
        yield node


def _is_read_in_another_layout(node: Node) -> bool:
    """Whether a value made from a result is watched, while the result itself would have to be read once more.

    Attention's results, and matmuls that are split into heads: the next operand is a permuted view of them.
    """
    return is_attention(node) or (node.target in PLAIN_MATMULS and _is_only_permuted(node))


def _is_only_permuted(node: Node) -> bool:
    users = [user for user in node.users if is_view(user)]
    return bool(users) and all(u.target is aten.permute.default or _is_only_permuted(u) for u in users)


def _may_be(root: Node, source: Source) -> bool:
    """Whether a value is an activation or depends on a gradient; for an input, whether it is data or an incoming gradient."""
    if not is_tensor(root) or (SPLICED in root.meta and not is_clipped(root)):
        return False
    if root.op == "placeholder":
        return source == Source.DATA or (is_tangent(root) and not any(map(is_clipped, root.users)))
    return Source.GRADIENT in source or is_activation(source)  # not a mask, where -inf is intended


def _is_cheap(root: Node, source: Source, weights: Collection[Node]) -> bool:
    """Whether a value can be counted by the kernel that makes it anyway, or is a parameter's gradient.

    The gradient of a linear's input comes from a matmul, and Inductor splits a kernel in two that counts while it reads three
    of them. An overflow there is seen in the next gradient that a linear takes.
    """
    return root in weights or Source.GRADIENT not in source or not leaves_a_contraction(root)


def leaves_a_contraction(root: Node) -> bool:
    """Whether a value is the result of a kernel that is not generated."""
    made = root.args[0] if root.target is private.getitem else root
    return isinstance(made, Node) and contracts(made)


def read_by(root: Node) -> Iterator[Node]:
    """The operations that read a value, through views."""
    for user in root.users:
        if is_view(user):
            yield from read_by(user)
        else:
            yield user


def is_clipped(node: Node) -> bool:
    """Whether saturate_gradients put it there."""
    return CLIPPED in node.meta


def _is_wanted(root: Node, source: Source, weights: Collection[Node], ctx: Context, everything: bool) -> bool:
    """Whether the recipe observes the value's dtype and, unless it observes all, whether that is cheap."""
    value, observe = root.meta["val"], ctx.recipe_at(module_path(root)).fp32.observe
    if not isinstance(value, Tensor) or value.dtype not in OBSERVED[observe]:
        return False
    return everything or observe is True or _is_cheap(root, source, weights)


def _in_memory_order(view: Node) -> Node:
    """The first contiguous value on the way from a view back to its base, or the base."""
    while is_view(view) and not view.meta["val"].is_contiguous():
        parent = view.args[0]
        assert isinstance(parent, Node)
        view = parent
    return view


def _maker(root: Node) -> Node:
    """The node that made a value, before it was clipped, copied or cut up."""
    while is_clipped(root) or root.target is aten.clone.default or _is_a_part(root):
        parent = root.args[0]
        assert isinstance(parent, Node)
        root = storage_root(parent)
    return root


def _is_a_part(node: Node) -> bool:
    """Whether a node is a part that split or unbind cut from a value, or that operation itself."""
    made = node.args[0] if node.target is private.getitem else node
    return isinstance(made, Node) and is_split(made)


def _value(node: Node, root: Node, source: Source, weights: dict[Node, str]) -> ObservedValue:
    made = _maker(root)
    op = OUTPUT if is_tangent(made) else op_name(made)
    where = Origin(op, module_path(made), source_line(made))
    if root in weights:
        return ObservedValue(root, WEIGHT, BACKWARD, Origin(where.op, weights[root], where.source))
    if Source.GRADIENT in source:
        return ObservedValue(node, ACTIVATION, BACKWARD, where)
    return ObservedValue(node, DATA if root.op == "placeholder" else ACTIVATION, FORWARD, where)


def _gradients_of_parameters(graph: Graph, ctx: Context) -> dict[Node, str]:
    """The values that are gradients of parameters, up to views and casts, with the parameters' paths."""
    names = dict(ctx.stats_inputs.names) if ctx.stats_inputs else {}
    found = {}
    for desc, node in gradients(graph):
        if (name := names.get(position(desc))) is not None:  # type: ignore[arg-type]
            found[storage_root(node)] = found[uncast(node)] = name
    return found
