"""Grouped matmuls of experts in FP8: which are taken, how their operands are encoded, and the product in their place.

    matmul    left                                  right
    forward   x  [T, K] per row                     W' [E, K, N] per column of each expert
    dgrad     dy [T, N] per row                     W  [E, N, K] per column of each expert
    wgrad     dy' [N, T] per row of each expert's   x  [T, K] per column of each expert's rows

All codes are E4M3, gradients' too: ``_scaled_grouped_mm`` takes no other format, and gives BF16. Scales are taken from the
operands themselves, whatever ``Recipe.linears.scaling`` says: a known scale is one for a tensor, and the tokens of an expert
come and go. A value has one encoding for each dimension that is contracted, as with "rowwise" (linears/operands.py).

"auto" leaves experts on devices whose rates are known: no time of a grouped matmul is predicted. No product has been run on a
GPU. Emulated, operands are decoded to BF16 and multiplied by the grouped matmul itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.analysis.linears import Matmul
from fp8compile.fx.graph import AGAIN, ENCODING, insertion_point_after, splice
from fp8compile.fx.ops import FORWARD, TRANSPOSES, WGRAD
from fp8compile.fx.tracing import stored
from fp8compile.linears.operands import Encoded, How, Operands, encoding
from fp8compile.linears.products import put_in_place
from fp8compile.linears.views import later
from fp8compile.numerics import E4M3, Rowwise
from fp8compile.numerics.grouped_scales import (
    amax_of_parts,
    decode_parts,
    encode_parts,
    experts_of_rows,
    place_parts,
    places_of_parts,
)
from fp8compile.numerics.scaling import inv_scale_of
from fp8compile.recipe.recipe import Recipe

BY_ROWS = How(E4M3, rowwise=True)
OF_PARTS = (
    "owners",
    "places",
    "scale_part",
    "encode_part",
    "decode_part",
    "lay_out_part",
)  # what is made for a wgrad's operands
ALONG_PARTS = "e4m3 per expert and column"


@dataclass(frozen=True)
class _Groups:
    """Whose rows are whose: the first row behind each expert's, and a value of the forward with as many rows."""

    ends: Node
    like: Node


class ExpertMatmuls:
    """The grouped matmuls of one graph and what they share: codes, and which rows are whose."""

    def __init__(self, graph: Graph, operands: Operands) -> None:
        self.graph, self.operands = graph, operands
        self._made: dict[tuple[Any, ...], Any] = {}

    def rewrite(self, matmul: Matmul, recipe: Recipe) -> str:
        """Replace a grouped matmul by one of codes, or of decoded operands; returns the operands' formats."""
        of = self._parts if matmul.direction == WGRAD else self._rows
        of(matmul, recipe.linears.emulate)
        dynamic = " (experts: dynamic)" if recipe.linears.scaling == "delayed" else ""
        return f"e4m3 x e4m3 rowwise{dynamic}" + (", emulated" if recipe.linears.emulate else "")

    def _rows(self, matmul: Matmul, emulate: bool) -> None:
        """Forward and dgrad."""
        left, right = matmul.operands
        if emulate:
            matmul.node.update_arg(0, self.operands.decoded(left, "left", BY_ROWS))
            matmul.node.update_arg(1, self._decoded_weight(right))
            return
        x, weight = self.operands.codes(left, "left", BY_ROWS), self._weight_by_columns(right)
        fast = matmul.direction == FORWARD  # as linears have it: gradients accumulate in full FP32

        def scaled_grouped_mm(x: Tensor, w: Tensor, inv_x: Tensor, inv_w: Tensor, ends: Tensor) -> Tensor:
            scales = inv_x.reshape(-1), inv_w
            return torch._scaled_grouped_mm(x, w, *scales, ends, out_dtype=torch.bfloat16, use_fast_accum=fast)

        ends = _ends(matmul)
        put_in_place(matmul.node, scaled_grouped_mm, x.codes, weight.codes, x.inv_scale, weight.inv_scale, ends)

    def _parts(self, matmul: Matmul, emulate: bool) -> None:
        """The wgrad: both operands are contracted along tokens."""
        (left, right), ends = matmul.operands, _ends(matmul)
        bases = self._by_rows(left, is_transposed=True), self._by_rows(right, is_transposed=False)
        groups = _Groups(ends, bases[1 if matmul.gradients[0] else 0])
        if emulate:
            matmul.node.update_arg(0, self._once(transposed, self._decoded_part(bases[0], groups)))
            matmul.node.update_arg(1, self._decoded_part(bases[1], groups))
            return
        a, b = (self._part_laid_out(base, groups) for base in bases)

        def scaled_grouped_mm(a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, ends: Tensor) -> Tensor:
            inv_a, inv_b = (inv_scale.narrow(0, 0, ends.shape[0]).reshape(-1) for inv_scale in (inv_a, inv_b))
            return torch._scaled_grouped_mm(
                a, b.t(), inv_a, inv_b, ends, out_dtype=torch.bfloat16, use_fast_accum=False
            )

        behind = self._places(groups)[2]
        put_in_place(matmul.node, scaled_grouped_mm, a.codes, b.codes, a.inv_scale, b.inv_scale, behind)

    def _once(self, make: Callable[..., Any], *nodes: Node, also: object = None) -> Any:
        """What ``make`` gives on these nodes, spliced behind the last of them once for all that ask."""
        key = (make.__name__, nodes, also)
        if key not in self._made:
            last = nodes[0]
            for node in nodes[1:]:
                last = later(last, node)
            mark = AGAIN if make.__name__ in OF_PARTS else None
            self._made[key] = splice(self.graph, make, *nodes, before=insertion_point_after(last), mark=mark)
        return self._made[key]

    def _weight(self, operand: Node) -> tuple[Encoded, bool, list[Node]]:
        """A weight's codes ``[E, columns, contracted]``, whether that is the transpose of what is stored, and the transposes
        that lead from there to the operand."""
        base, views = _without_transposes(operand, 3)
        across = len(views) % 2 == 0

        def encode_weight(w: Tensor) -> tuple[Tensor, Tensor]:
            codes, inv_scale = Rowwise(E4M3).encode(w.transpose(1, 2) if across else w)
            return stored(codes.contiguous()), inv_scale

        codes, inv_scale = self._once(encode_weight, base, also=across)
        _mark(base, f"{E4M3.name} rowwise", codes, inv_scale)
        return Encoded(codes, inv_scale), across, views

    def _weight_by_columns(self, operand: Node) -> Encoded:
        encoded, *_ = self._weight(operand)

        def as_columns(codes: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
            return codes.transpose(1, 2), inv_scale.squeeze(-1)

        return Encoded(*self._once(as_columns, encoded.codes, encoded.inv_scale))

    def _decoded_weight(self, operand: Node) -> Node:
        (encoded, across, views), dtype = self._weight(operand), operand.meta["val"].dtype

        def decode_weight(codes: Tensor, inv_scale: Tensor) -> Tensor:
            w = Rowwise(E4M3).decode(codes, inv_scale, dtype)
            return w.transpose(1, 2) if across else w

        return self.operands.with_views(self._once(decode_weight, encoded.codes, encoded.inv_scale), views)

    def _by_rows(self, operand: Node, *, is_transposed: bool) -> Node:
        """An operand as ``[T, columns]``; ``is_transposed``: it is the transpose of that."""
        base, views = _without_transposes(operand, 2)
        node: Node = base if len(views) % 2 == is_transposed else self._once(transposed, base)
        return node

    def _of_groups(self, make: Callable[[Tensor, int], Any], name: str, groups: _Groups) -> Any:
        """What ``make`` gives for the groups and the number of rows."""
        rows = groups.like.meta["val"].shape[0]
        if isinstance(rows, int):
            return self._once(_named(name, lambda ends: make(ends, rows)), groups.ends, also=rows)
        return self._once(_named(name, lambda ends, like: make(ends, like.shape[0])), groups.ends, groups.like)

    def _owners(self, groups: _Groups) -> Node:
        node: Node = self._of_groups(experts_of_rows, "owners", groups)
        return node

    def _places(self, groups: _Groups) -> tuple[Node, Node, Node]:
        found: tuple[Node, Node, Node] = self._of_groups(stored_places, "places", groups)
        return found

    def _part(self, base: Node, groups: _Groups) -> Encoded:
        experts, owners = groups.ends.meta["val"].shape[0], self._owners(groups)

        def scale_part(x: Tensor, owners: Tensor) -> Tensor:
            return stored(inv_scale_of(amax_of_parts(x, owners, experts), E4M3))

        def encode_part(x: Tensor, owners: Tensor, inv_scale: Tensor) -> Tensor:
            return encode_parts(x, owners, inv_scale, E4M3)

        inv_scale = self._once(scale_part, base, owners)
        codes = self._once(encode_part, base, owners, inv_scale)
        _mark(base, ALONG_PARTS, codes, inv_scale)
        return Encoded(codes, inv_scale)

    def _decoded_part(self, base: Node, groups: _Groups) -> Node:
        encoded, owners, dtype = self._part(base, groups), self._owners(groups), base.meta["val"].dtype

        def decode_part(codes: Tensor, inv_scale: Tensor, owners: Tensor) -> Tensor:
            return decode_parts(codes, inv_scale, owners, dtype)

        node: Node = self._once(decode_part, encoded.codes, encoded.inv_scale, owners)
        return node

    def _part_laid_out(self, base: Node, groups: _Groups) -> Encoded:
        encoded, (row, is_there, _) = self._part(base, groups), self._places(groups)

        def lay_out_part(codes: Tensor, row: Tensor, is_there: Tensor) -> Tensor:
            by_rows = stored(place_parts(codes, row, is_there))  # rows are gathered whole, then transposed in tiles
            return stored(by_rows.t().contiguous())

        return Encoded(self._once(lay_out_part, encoded.codes, row, is_there), encoded.inv_scale)


def stored_places(ends: Tensor, rows: int) -> tuple[Tensor, ...]:
    """``places_of_parts``, each stored: a kernel that takes rows by them would find each place again for every element."""
    return tuple(map(stored, places_of_parts(ends, rows)))


def _named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function under the name that dumps give it."""
    fn.__name__ = name
    return fn


def transposed(x: Tensor) -> Tensor:
    return x.t()


def _ends(matmul: Matmul) -> Node:
    ends = matmul.node.args[2]
    assert isinstance(ends, Node)
    return ends


def _mark(base: Node, codec: str, *nodes: Node) -> None:
    """Say of codes and of their scales that they are an operand's."""
    for node in nodes:
        node.meta[ENCODING] = encoding(codec, base)


def _without_transposes(operand: Node, dim: int) -> tuple[Node, list[Node]]:
    """The value beneath the transposes of the last two of ``dim`` dimensions, and these, the innermost first."""
    views: list[Node] = []
    while operand.target in TRANSPOSES and _swaps_the_last_two(operand, dim):
        views.insert(0, operand)
        operand = operand.args[0]  # type: ignore[assignment]
    return operand, views


def _swaps_the_last_two(view: Node, dim: int) -> bool:
    value = view.args[0].meta["val"]  # type: ignore[union-attr]
    order = [*range(dim - 2), dim - 1, dim - 2]
    dims: Any = view.args[1:] if view.args[1:] else ()
    if view.target is torch.ops.aten.permute.default:
        return value.dim() == dim and [d % dim for d in dims[0]] == order
    return value.dim() == dim and (not dims or {d % dim for d in dims} == {dim - 2, dim - 1})
