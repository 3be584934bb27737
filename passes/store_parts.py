"""Numbers stay as they are. A concatenation of parts that are computed from the same tensors stores each part by itself.

    cat([f(g, h), k(g, h)], -1)    ->    fp8compile.joined([f(g, h), k(g, h)], -1)      one kernel, two stores

It is the gradient of a split: of gate and up in one matrix, as experts have them. Inductor would compute both parts for every
element of the result and choose one (fp8compile/fx/parts.py). With decodes in each part, a layer of experts spent half the
time of its generated kernels there.

Left as they are: parts that are in memory already, parts of several shapes, parts with readers of their own, a result that a
pointwise operation or a sum reads, which would be fused with it, and everything on other devices than an NVIDIA GPU.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from fp8compile.fx.graph import SPLICED, is_static, is_tensor
from fp8compile.fx.ops import argument_of, computed_from, is_generated, is_pointwise, readers
from fp8compile.fx.parts import JOINED
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten
MOST = 8  # parts; with more Inductor stores them one by one itself
ALIGNED = 16  # bytes that a GPU stores at once: a part begins at a multiple


def store_parts(graph: Graph, ctx: Context) -> Notes:
    """Store the parts of concatenations one by one, where each would be computed several times."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, dim = _parts(node)
        if 1 < len(parts) <= MOST and _are_computed(parts) and _begin_aligned(parts, dim) and _is_stored(node):
            node.target, node.args, node.kwargs = JOINED, (parts, dim), {}
    return Notes()


def _parts(node: Node) -> tuple[list[Node], int]:
    """What is concatenated, and along which dimension, counted from the front."""
    rank = node.meta["val"].dim() if is_tensor(node) else 1
    return list(argument_of(node, "tensors")), argument_of(node, "dim", 0) % rank


def _are_computed(parts: list[Node]) -> bool:
    """Whether parts of one shape and dtype are computed for the concatenation alone, all of them from a tensor of theirs."""
    if not all(is_tensor(part) and is_static(part) and is_pointwise(part) and len(part.users) == 1 for part in parts):
        return False
    alike = {(part.meta["val"].shape, part.meta["val"].dtype) for part in parts}
    read = [{each for each in computed_from(part) if _is_as_large(each, part)} for part in parts]
    return len(alike) == 1 and len(set(parts)) == len(parts) and bool(set.intersection(*read))


def _is_as_large(value: Node, part: Node) -> bool:
    return is_tensor(value) and value.meta["val"].numel() >= part.meta["val"].numel()


def _begin_aligned(parts: list[Node], dim: int) -> bool:
    """Whether the part behind the first begins where a GPU stores at once: all do, since they are alike."""
    value = parts[0].meta["val"]
    along: int = math.prod(value.shape[dim:]) * value.element_size()
    return along % ALIGNED == 0


def _is_stored(node: Node) -> bool:
    """Whether the result goes to memory in any case, or should: nothing of the user's that Inductor would fuse reads it.

    An encode reads it twice, for the amax and for the codes, and would compute all parts each time.
    """
    users = [user for user in readers(node) if SPLICED not in user.meta]
    return not any(map(is_generated, users))
