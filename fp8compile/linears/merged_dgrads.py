"""The dgrads of linears that read one input, as one matmul (``Recipe.linears.merge_dgrads``).

    dx = dq Wq + dk Wk + dv Wv  =  [dq dk dv] [Wq; Wk; Wv]

A matmul adds up in FP32 what would else be stored thrice in 16 bits and added up by the kernel that reads it. Each gradient's
codes are stored where they stand in ``[dq dk dv]``; the codes of the weights come in as one matrix
(fp8compile/linears/cached_weights.py). Scales are balanced, so that weights keep their codes (numerics/balance.py).
Forward and wgrad stay a matmul for each linear: they have nothing to add up, so merging them would move no byte less.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.analysis.linears import uncast
from fp8compile.analysis.sums import Sum, sum_of
from fp8compile.fx.graph import ENCODING, insertion_point_after, splice
from fp8compile.fx.ops import DGRAD
from fp8compile.fx.provenance import module_path
from fp8compile.linears.known_scales import BALANCED, GRADIENT, ScaleRow, codes_under
from fp8compile.linears.layouts import as_matrix
from fp8compile.linears.operands import Operands, encoding
from fp8compile.linears.plan import Apply
from fp8compile.linears.views import beneath, is_across, later, repeated
from fp8compile.numerics import Tensorwise
from fp8compile.numerics.balance import balanced

NOT_ALIKE = "the recipes of the linears differ, or their dtypes"
NOT_KNOWN = "its scale is not known before it"
NOT_CACHED = "the codes of a weight do not come in with the inputs"
NOT_PACKED = "the codes of just these weights do not come in as one matrix"
TRANSPOSED = "a gradient comes transposed"
ONE_GRADIENT = "two of the linears have one gradient"
NOT_SUMMED = "the results are not only added up"
NO_ROW = "no row is left for its scale"
PLAIN = (True, False)  # which operands depend on a tangent: dy W


@dataclass(frozen=True)
class GradientMatrix:
    """A gradient as a matrix of some width, its row and its own scale."""

    value: Node
    width: int | None
    row: ScaleRow
    inv_scale: Node


@dataclass(frozen=True)
class Merged:
    """Dgrads that become one matmul, in the order of their weights among the graph's inputs; and their sum."""

    members: tuple[Apply, ...]
    gradients: tuple[GradientMatrix, ...]
    total: Sum


class MergedDgrads:
    """The dgrads of a joint graph that become one matmul with others, and why others do not.

    Attributes:
        notes: by dgrad, what becomes of it, for the report.
        taken: the dgrads that ``rewrite`` replaces.
    """

    def __init__(self, operands: Operands, applied: Sequence[Apply]) -> None:
        self.operands, self._merged = operands, list[Merged]()
        self.notes: dict[Node, str] = {}
        self.taken: set[Node] = set()
        for members in _of_one_input(applied):
            self._plan(members)

    def _plan(self, members: Sequence[Apply]) -> None:
        found = _judged(members, self.operands)
        names = {each.matmul.node: module_path(each.matmul.forward) for each in members}
        if isinstance(found, str):
            self.notes |= dict.fromkeys(names, f", not merged: {found}")
            return
        for each in found.members:  # now, so that no other matmul takes a weight in another dtype first
            assert self.operands.weights is not None
            self.operands.weights.codes(*_weight_of(each)[:2], each.specs[1].module)
        self._merged.append(found)
        self.taken |= {*names}
        for node in names:
            others = ", ".join(name or "a linear without a module" for n, name in names.items() if n is not node)
            self.notes[node] = f", merged with {others}"

    def rewrite(self) -> None:
        """Replace each sum by one matmul and what it adds to that."""
        for merged in self._merged:
            _replace(self.operands, merged)


def _of_one_input(applied: Sequence[Apply]) -> list[list[Apply]]:
    """The dgrads of linears that read one input, where there are several and the recipe merges one of them."""
    groups: dict[Node, list[Apply]] = defaultdict(list)
    for each in applied:
        if each.matmul.direction == DGRAD and each.matmul.gradients == PLAIN:
            left, _ = dataclasses.replace(each.matmul, node=each.matmul.forward).operands
            groups[uncast(left)].append(each)
    return [
        group
        for group in groups.values()
        if len(group) > 1 and any(each.recipe.linears.merge_dgrads for each in group)
    ]


def _judged(members: Sequence[Apply], operands: Operands) -> Merged | str:
    """How dgrads become one matmul, or why they do not."""
    if len({each.alike for each in members}) > 1:
        return NOT_ALIKE
    if not members[0].specs[0].delayed or operands.scales is None:
        return NOT_KNOWN
    if not all(operands.is_cached(each.matmul.operands[1], "right", each.specs[1]) for each in members):
        return NOT_CACHED
    weights = operands.weights
    assert weights is not None
    positions = [weights.position_of(*_weight_of(each)[:2]) for each in members]
    members = [each for _, each in sorted(zip(positions, members, strict=True), key=lambda pair: pair[0])]
    if any(is_across(_weight_of(each)[2]) for each in members) or not weights.are_packed(sorted(positions)):
        return NOT_PACKED
    total = sum_of([each.matmul.node for each in members])
    if total is None:
        return NOT_SUMMED
    gradients = _gradients(members, operands)
    return gradients if isinstance(gradients, str) else Merged(tuple(members), gradients, total)


def _weight_of(each: Apply) -> tuple[Node, int | None, list[Node]]:
    """The weight of a dgrad as a matrix of some width, and the transposes that lead to the operand."""
    return beneath(each.matmul.operands[1], "right", False)[:3]


def _gradients(members: Sequence[Apply], operands: Operands) -> tuple[GradientMatrix, ...] | str:
    """The gradients of dgrads with their rows, or why there are none."""
    found = list[GradientMatrix]()
    for each in members:
        value, width, transposes, _ = beneath(each.matmul.operands[0], "left", False)
        if transposes:
            return TRANSPOSED
        if any(value is other.value for other in found):
            return ONE_GRADIENT
        how, scales = each.specs[0], operands.scales
        row = scales.row_of(value, how.format, GRADIENT, how.module) if scales else None
        if row is None:
            return NO_ROW
        found.append(GradientMatrix(value, width, *row))
    return tuple(found)


def _replace(operands: Operands, merged: Merged) -> None:
    """One matmul, and what else is added, for the sum and all that it was made of."""
    graph, root, members = operands.graph, merged.total.root, merged.members
    product = _emulated if members[0].recipe.linears.emulate else _scaled
    y = product(operands, merged)
    for view in merged.total.chain:
        y = repeated(graph, view, y)

    def total(y: Tensor, *others: Tensor) -> Tensor:
        return functools.reduce(torch.add, (*others, y))

    if merged.total.others:
        y = splice(graph, total, y, *merged.total.others, before=root)
    root.replace_all_uses_with(y)
    dgrads = [each.matmul.node for each in members]
    for node in sorted((root, *merged.total.inside, *dgrads), reverse=True):
        graph.erase_node(node)


def _scaled(operands: Operands, merged: Merged) -> Node:
    """The matmul of codes: gradients in rows, and weights as they come in, ``[K, N]``."""
    graph, weights, first = operands.graph, operands.weights, merged.members[0].matmul.node
    assert weights is not None
    packed, w = weights.packed([(*_weight_of(each)[:2], each.specs[1].module) for each in merged.members])
    g, *own = _balanced(operands, merged, w)
    codes, dtype = _in_one_matrix(graph, _encoded(graph, merged, own)), first.meta["val"].dtype

    def scaled_mm(a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), inv_a, inv_b, out_dtype=dtype, use_fast_accum=False)

    product: Node = splice(graph, scaled_mm, codes, packed, g, w, before=merged.total.root)
    return product


def _emulated(operands: Operands, merged: Merged) -> Node:
    """The matmul of decoded codes."""
    graph, members = operands.graph, merged.members
    weights = [operands.decoded(each.matmul.operands[1], "right", each.specs[1]) for each in members]
    own = _balanced(operands, merged)[1:]
    dtype, fmt, n = members[0].matmul.node.meta["val"].dtype, members[0].specs[0].format, len(members)

    def mm(*tensors: Tensor) -> Tensor:
        codes, inv_scales, weights = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        decoded = [
            Tensorwise(fmt).decode(as_matrix(each), inv_scale.reshape(()), dtype)
            for each, inv_scale in zip(codes, inv_scales, strict=True)
        ]
        return torch.mm(torch.cat(decoded, 1), torch.cat(weights))

    codes = _encoded(graph, merged, own)
    product: Node = splice(graph, mm, *codes, *own, *weights, before=merged.total.root)
    return product


def _balanced(operands: Operands, merged: Merged, largest: Node | None = None) -> tuple[Node, ...]:
    """The scale of the gradients in the matmul, and what each of them is encoded under. ``largest`` is the largest scale of
    the weights, if that comes in."""
    assert operands.weights is not None
    n, own = len(merged.members), [each.inv_scale for each in merged.gradients]
    weights = [operands.weights.inv_scale(*_weight_of(each)[:2]) for each in merged.members]

    def balance(*scales: Tensor) -> tuple[Tensor, ...]:
        weights = scales[n : 2 * n]
        w = scales[-1] if largest is not None else torch.cat(weights).amax(0, keepdim=True)
        return balanced(scales[:n], weights, w)

    last = functools.reduce(later, own)
    scales = [*own, *weights, *([largest] if largest is not None else [])]
    found: tuple[Node, ...] = splice(operands.graph, balance, *scales, before=insertion_point_after(last))
    return found


def _encoded(graph: Graph, merged: Merged, scales: Sequence[Node]) -> list[Node]:
    """The codes of each gradient, in the shape ``[..., width]`` that its kernel has if that is one shape for all."""
    found = list[Node]()
    for each, scale in zip(merged.gradients, scales, strict=True):
        codes = codes_under(graph, each.value, scale, each.row, each.width, lambda codes: codes)
        codes.meta[BALANCED] = True
        codes.meta[ENCODING] = encoding(f"{each.row.format.name} delayed", each.value)
        found.append(codes)
    return found


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def _in_one_matrix(graph: Graph, codes: Sequence[Node]) -> Node:
    first = codes[0].meta["val"].shape[:-1]
    alike = all(_are_equal(each.meta["val"].shape[:-1], first) for each in codes)

    def side_by_side(*codes: Tensor) -> Tensor:
        return as_matrix(torch.cat(codes if alike else [as_matrix(each) for each in codes], -1))

    last = functools.reduce(later, codes)
    node: Node = splice(graph, side_by_side, *codes, before=insertion_point_after(last))
    return node
