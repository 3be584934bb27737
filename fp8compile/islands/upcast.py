"""Computing chosen nodes of a graph in FP32: the rewrite that FP32 islands and their calibration use.

    y: f16 = op(x: f16)     ->    y: f32 = op(float(x)),  and one cast float -> half for those that still read y in 16 bit

Between two chosen nodes the value stays FP32. A cast that is chosen disappears, and so does a multiplication by one. A reader
that takes FP32 anyway (an upcast, a comparison) gets the FP32 value. But what is compared for equality with a 16-bit value,
as with its own maximum, stays in 16 bit: in FP32 nothing would be equal.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fp8compile import _torch as private
from fp8compile.fx.graph import SPLICED, WIDENED, is_tensor
from fp8compile.fx.ops import CAST, CASTS, SIXTEEN_BIT, is_attention, opname

aten, prims = torch.ops.aten, torch.ops.prims

EQUALITY = (aten.eq.Tensor, aten.ne.Tensor)
_WRITES = (aten.copy_.default, aten.copy.default)


def is_sixteen_bit(node: object) -> bool:
    """Whether a node gives a 16-bit floating-point tensor, or a tuple with one."""
    values = pytree.tree_leaves(node.meta.get("val")) if isinstance(node, Node) else []
    return any(isinstance(v, Tensor) and v.dtype in SIXTEEN_BIT for v in values)


def holds_sixteen_bit(graph: Graph) -> bool:
    """Whether a graph computes anything in 16 bit."""
    return any(can_widen(node) for node in graph.nodes)


def can_widen(node: Node) -> bool:
    """Whether a node is an operation on 16-bit values that can be computed in FP32 instead."""
    if node.op != "call_function" or SPLICED in node.meta or not is_sixteen_bit(node):
        return False
    if node.target is private.getitem:
        return isinstance(node.args[0], Node) and can_widen(node.args[0])
    known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return known and node.target not in _WRITES and not takes_no_fp32(node)


def takes_no_fp32(node: Node) -> bool:
    """Whether a node is fused attention by a kernel that takes 16 bit only: flash and cuDNN attention on a GPU."""
    name = opname(node)
    return is_attention(node) and ("flash" in name or "cudnn" in name) and "for_cpu" not in name


def widen(graph: Graph, nodes: Set[Node]) -> dict[Node, Node]:
    """Compute ``nodes`` (each ``can_widen``) in FP32; returns the FP32 node that replaces each of them, in graph order.

    A reader that is not among them gets the value cast back to its dtype.
    """
    work = _Widening(graph)
    order = [node for node in graph.nodes if node in nodes]
    for node in order:
        work.widen(node)
    for node in order:
        work.hand_over(node)
    for node in reversed(order):
        graph.erase_node(node)
    return {node: work.wide[node] for node in order}


def is_no_op(node: Node) -> bool:
    """Whether a node multiplies or divides by one: ``1 / x`` becomes a reciprocal and such a node."""
    return node.target in (aten.mul.Tensor, aten.div.Tensor) and node.args[1:] in ((1,), (1.0,)) and not node.kwargs


class _Widening:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.wide: dict[Node, Node] = {}
        self._upcast: dict[Node, Node] = {}

    def widen(self, node: Node) -> None:
        source = node.args[0] if node.args else None
        if (node.target in CASTS or is_no_op(node)) and isinstance(source, Node):
            value = self._in_fp32(source)
            if node.target not in CASTS or value.meta["val"].dtype == torch.float32:
                self.wide[node] = value
                return
        with self.graph.inserting_before(node):
            arguments, keywords = (map_aggregate(each, self._wide_argument) for each in (node.args, node.kwargs))
            new = self.graph.create_node(
                "call_function",
                node.target,
                arguments,  # type: ignore[arg-type]
                keywords,  # type: ignore[arg-type]
                name=f"{node.name}_f32",
            )
        new.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"} | {"val": _value_of(new)}
        new.meta[WIDENED] = node.name
        self.wide[node] = new

    def hand_over(self, node: Node) -> None:
        """Give the value to those that were not widened: in FP32 where they take it, else cast back."""
        wide, narrow = self.wide[node], None
        for user in list(node.users):
            if user in self.wide:
                continue  # erased, last first
            if user.target is private.getitem:
                user.replace_input_with(node, wide)  # a part that is not 16-bit
            elif user.target in CASTS and user.meta["val"].dtype == torch.float32:
                user.replace_all_uses_with(wide)
                self.graph.erase_node(user)
            elif not is_sixteen_bit(user) and can_take_fp32(user) and not self._meets_sixteen_bit(user):
                user.args = map_aggregate(user.args, self._wide_argument)
                user.kwargs = map_aggregate(user.kwargs, self._wide_argument)
            else:
                narrow = narrow or self._cast(wide, node.meta["val"].dtype, node)
                user.replace_input_with(node, narrow)

    def _meets_sixteen_bit(self, user: Node) -> bool:
        """Whether a node asks if values are equal, of which one stays in 16 bit."""
        return user.target in EQUALITY and any(n not in self.wide and is_sixteen_bit(n) for n in user.all_input_nodes)

    def _wide_argument(self, argument: Any) -> Any:
        if isinstance(argument, torch.dtype) and argument in SIXTEEN_BIT:
            return torch.float32
        return self._in_fp32(argument) if is_sixteen_bit(argument) else argument

    def _in_fp32(self, node: Node) -> Node:
        """The node's value in FP32: as computed, or cast up (once)."""
        if node in self.wide:
            return self.wide[node]
        if not is_sixteen_bit(node):
            return node
        if node not in self._upcast:
            self._upcast[node] = self._cast(node, torch.float32, node)
        return self._upcast[node]

    def _cast(self, value: Node, dtype: torch.dtype, like: Node) -> Node:
        """A cast directly after ``value``, with the provenance of ``like``."""
        after = value if value.op != "placeholder" else list(self.graph.find_nodes(op="placeholder"))[-1]
        with self.graph.inserting_after(after):
            name = f"{like.name}_{'f32' if dtype == torch.float32 else 'cast'}"
            cast = self.graph.create_node("call_function", CAST, (value, dtype), name=name)
        kept = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "autograd_backward")
        cast.meta = {k: v for k, v in like.meta.items() if k in kept} | {"val": _value_of(cast)}
        return cast


def can_take_fp32(node: Node) -> bool:
    """Whether an operation whose result is not 16-bit may read FP32 instead of 16 bit: aten's own may, ours may not."""
    known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return known and SPLICED not in node.meta and node.target not in CASTS and is_tensor(node)


def _value_of(node: Node) -> Any:
    """The fake value of a new node, from those of its arguments."""
    arguments: Any
    keywords: Any
    arguments, keywords = (
        map_aggregate(each, lambda a: a.meta["val"] if isinstance(a, Node) else a)
        for each in (node.args, node.kwargs)
    )
    mode = private.detect_fake_mode(pytree.tree_leaves((arguments, keywords))) or private.detect_fake_mode(
        [n.meta.get("val") for n in node.graph.find_nodes(op="placeholder")]
    )
    assert mode is not None and callable(node.target), "values of a graph that is compiling are fake"
    with mode, torch.no_grad():
        return node.target(*arguments, **keywords)
