"""Operands of matmuls as FP8 codes: each value encoded once for a format and scaling axis, shared by all its uses.

Tensorwise, a value's codes do not depend on the view that a matmul takes of it. So the value under the views is encoded, as
the matrix that the matmuls take, and transposes are repeated on the codes. (If the codes had the value's own shape, Inductor
would store a copy for every matmul that takes a view of them: it realizes the base of a view that mm takes, but not of one
that _scaled_mm takes; torch 2.13, needs_realized_inputs.) Rowwise, the scales run along the contracted dimension, so a
matrix has one encoding for each of its two dimensions. In INT8 reshapes that leave rows whole are looked through; in FP8 what
is lowered for a GPU was counted without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.analysis.linears import PLAIN_MATMULS
from fp8compile.fx.graph import (
    AMAX,
    ENCODING,
    INV_SCALES,
    Encoding,
    dtype_text,
    insertion_point_after,
    nbytes,
    splice,
)
from fp8compile.fx.ops import RESHAPES, TRANSPOSES, computed_from, is_reduction, is_view, readers
from fp8compile.fx.tracing import stored
from fp8compile.linears.cached_weights import CachedWeights
from fp8compile.linears.first_amax import amax_in, first_parts, is_dear
from fp8compile.linears.known_scales import GRADIENT, KnownScales, codes_under
from fp8compile.linears.layouts import (
    as_matrix,
    as_operand,
    by_columns,
    encoded_along,
    in_rows,
    is_in_order,
    stored_matrix,
)
from fp8compile.linears.row_blocks import ALONG_ROWS, ROW_BLOCKS
from fp8compile.linears.views import beneath, is_across, later, repeated
from fp8compile.numerics import INT8, Format, Rowwise, Tensorwise
from fp8compile.numerics.scaling import quantize

aten = torch.ops.aten


@dataclass(frozen=True)
class Encoded:
    """A value's codes. Tensorwise, ``inv_scale`` is 0-d; rowwise, it broadcasts along the contracted dimension."""

    codes: Node
    inv_scale: Node


@dataclass(frozen=True)
class How:
    """How an operand is to be encoded: its format; rowwise or tensorwise; ``delayed``, under a scale known before it;
    ``cached``, if it is a weight whose codes come in with the inputs.

    ``role`` and ``module`` say which operand of which linear it is.
    """

    format: Format
    rowwise: bool = False
    delayed: bool = False
    cached: bool = False
    role: str = ""
    module: str = ""


class Operands:
    """The operands of one graph. ``left`` and ``right`` are 2-D: contracted along dimension 1 and 0.

    ``stores_dear``: what takes long to compute is stored in 16 bit, rather than computed for its amax and for its codes.
    """

    def __init__(
        self,
        graph: Graph,
        scales: KnownScales | None = None,
        weights: CachedWeights | None = None,
        *,
        stores_dear: bool = True,
    ) -> None:
        self.graph, self.scales, self.weights, self.stores_dear = graph, scales, weights, stores_dear
        self._encoded: dict[Any, Encoded] = {}
        self._decoded: dict[Any, Node] = {}
        self._viewed: dict[tuple[Node, Node], Node] = {}
        self._pinned: dict[Node, Node] = {}
        self._laid_out: dict[tuple[Node, bool], Node] = {}
        self._laid_anew: dict[Any, Node] = {}

    def decoded(self, operand: Node, side: str, how: How) -> Node:
        """``operand`` encoded and decoded: the operand of an emulated matmul."""
        base, width, views, axis = beneath(operand, side, how.rowwise, how.format == INT8)
        fmt, key = how.format, (base, width, axis, how.format, how.delayed)
        if key not in self._decoded:
            cached = self.weights.codes(base, width, how.module) if how.cached and self.weights else None
            encoded = Encoded(*cached) if cached else self._encode(base, width, axis, how, stored=False)
            dtype, one = base.meta["val"].dtype, cached is not None or how.delayed

            def decode(codes: Tensor, inv_scale: Tensor) -> Tensor:
                return Tensorwise(fmt).decode(codes, inv_scale.reshape(()) if one else inv_scale, dtype)

            after = insertion_point_after(later(encoded.codes, encoded.inv_scale))
            self._decoded[key] = splice(self.graph, decode, encoded.codes, encoded.inv_scale, before=after)
        return self.with_views(self._decoded[key], views)

    def codes(self, operand: Node, side: str, how: How) -> Encoded:
        """Codes of ``operand`` laid out for ``_scaled_mm``: the left row-major, the right column-major, and their scale."""
        base, width, views, axis = beneath(operand, side, rowwise := how.rowwise, how.format == INT8)
        if how.cached and self.weights:
            cached = self.weights.laid_out(base, width, how.module, is_across(views), side)
            if cached:
                return Encoded(*cached)
        encoded = self._encode(base, width, axis, how)
        codes = self.with_views(encoded.codes, views)
        if not is_in_order(side, codes):
            known = how.delayed and self._under_known_scale_laid_out(side, base, width, views, how, encoded.codes)
            codes = known or self._copy(side, codes, once=not rowwise)
        elif not rowwise and not how.delayed:  # rowwise, this saved no bytes; known scales: stored already
            codes = self.with_views(self._stored(encoded.codes), views)
        scale = encoded.inv_scale
        if rowwise and views:  # only transposes
            scale = self.with_views(scale, views)
        return Encoded(codes, scale)

    def is_known(self, operand: Node, side: str, how: How) -> bool:
        """Whether an operand that was encoded has a scale that is known before it, or comes in encoded."""
        base, *_ = beneath(operand, side, how.rowwise)
        return self.is_cached(operand, side, how) or (
            how.delayed and self.scales is not None and (base, how.format) in self.scales.rows
        )

    def is_cached(self, operand: Node, side: str, how: How) -> bool:
        """Whether an operand is a weight whose codes come in with the inputs."""
        base, width, *_ = beneath(operand, side, how.rowwise)
        return how.cached and self.weights is not None and self.weights.has(base, width)

    def _encode(self, base: Node, width: int | None, axis: int | None, how: How, *, stored: bool = True) -> Encoded:
        key = (base, width, axis, how.format, how.delayed, stored and how.delayed)
        if key not in self._encoded:
            encoded = self._under_known_scale(base, width, how, stored) if how.delayed else None
            self._encoded[key] = encoded or self._under_own_scale(base, width, axis, how.format)
        return self._encoded[key]

    def _under_own_scale(self, base: Node, width: int | None, axis: int | None, fmt: Format) -> Encoded:
        if axis is None and (inv_scale := base.meta.get(INV_SCALES, {}).get(fmt)):
            return self._under_scale_of(base, width, fmt, inv_scale)
        if axis is None and AMAX in base.meta:
            return self._under_known_amax(base, width, fmt)
        codec = Tensorwise(fmt) if axis is None else Rowwise(fmt)
        is_kept = (self.stores_dear and is_dear(base)) or not _feeds_matmuls_only(base)
        once = axis is None and _is_computed(base) and is_kept
        parts = first_parts(base, width) if axis is None else None

        def encode(x: Tensor) -> tuple[Tensor, Tensor]:
            x = stored(x) if once else x
            amax = amax_in(x, parts) if parts else None
            x = x if width is None else x.reshape(-1, width)
            return codec.encode(x, amax) if isinstance(codec, Tensorwise) else encoded_along(codec, x, axis or 0)

        codes, inv_scale = splice(self.graph, encode, base, before=insertion_point_after(base))
        codes.meta[ENCODING] = inv_scale.meta[ENCODING] = encoding(codec.name, base)
        return Encoded(codes, inv_scale)

    def _under_scale_of(self, weight: Node, width: int | None, fmt: Format, inv_scale: Node) -> Encoded:
        """The codes of a weight whose scale was made with those of others."""

        def encode(x: Tensor, inv_scale: Tensor) -> Tensor:
            return quantize(x if width is None else x.reshape(-1, width), inv_scale, fmt)

        codes = splice(self.graph, encode, weight, inv_scale, before=insertion_point_after(later(weight, inv_scale)))
        codes.meta[ENCODING] = inv_scale.meta[ENCODING] = encoding(Tensorwise(fmt).name, weight)
        return Encoded(codes, inv_scale)

    def _under_known_amax(self, base: Node, width: int | None, fmt: Format) -> Encoded:
        codec, amax = Tensorwise(fmt), base.meta[AMAX]

        def encode(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
            return codec.encode(x if width is None else x.reshape(-1, width), amax)

        codes, inv_scale = splice(self.graph, encode, base, amax, before=insertion_point_after(later(base, amax)))
        codes.meta[ENCODING] = inv_scale.meta[ENCODING] = encoding(codec.name, base)
        return Encoded(codes, inv_scale)

    def _under_known_scale(self, base: Node, width: int | None, how: How, stored: bool) -> Encoded | None:
        """The codes under a scale that is known before, ``stored`` once for all matmuls; None where the graph's scales have
        no row left for it."""
        assert self.scales is not None
        found = self.scales.row_of(base, how.format, how.role, how.module)
        if found is None:
            return None
        row, inv_scale = found
        codes = codes_under(self.graph, base, inv_scale, row, width, stored_matrix if stored else as_matrix)
        codes.meta[ENCODING] = encoding(f"{how.format.name} delayed", base)
        return Encoded(codes, inv_scale)

    def _stored(self, codes: Node) -> Node:
        """The codes, stored once for all matmuls: see ``stored``."""
        if codes not in self._pinned:
            self._pinned[codes] = splice(self.graph, stored, codes, before=insertion_point_after(codes))
        return self._pinned[codes]

    def with_views(self, value: Node, views: list[Node]) -> Node:
        for view in views:
            key = (value, view)
            if key not in self._viewed:
                self._viewed[key] = repeated(self.graph, view, value)
            value = self._viewed[key]
        return value

    def _copy(self, side: str, codes: Node, once: bool) -> Node:
        """A copy in the right order, the contracted dimension padded with zeros to FP8_MULTIPLE."""
        left = side == "left"

        def lay_out(x: Tensor) -> Tensor:
            return in_rows(x, once) if left else in_rows(x.t(), once).t()

        if (codes, left) not in self._laid_out:
            self._laid_out[codes, left] = splice(self.graph, lay_out, codes, before=insertion_point_after(codes))
        return self._laid_out[codes, left]

    def _under_known_scale_laid_out(
        self, side: str, base: Node, width: int | None, views: list[Node], how: How, by_rows: Node
    ) -> Node | None:
        """The codes under a known scale in the right order; None where it is not known."""
        across, left = is_across(views), side == "left"
        key = (base, width, how.format, across, left)
        if key not in self._laid_anew:
            copies = how.role == GRADIENT and across == left and _is_made_in_rows(base)
            made = self._transposed(by_rows, left) if copies else self._laid_out_anew(base, width, across, left, how)
            if made is None:
                return None
            self._laid_anew[key] = made
        return self._laid_anew[key]

    def _laid_out_anew(self, base: Node, width: int | None, across: bool, left: bool, how: How) -> Node | None:
        """The codes made from the value itself: in the kernel that makes the value they cost a store."""
        assert self.scales is not None
        found = self.scales.row_of(base, how.format, how.role, how.module)
        if found is None:
            return None

        def lay_out(codes: Tensor) -> Tensor:
            return as_operand(codes, left, across == left)

        row, inv_scale = found
        made = codes_under(self.graph, base, inv_scale, row, width, lay_out, across == left)
        made.meta[ENCODING] = encoding(f"{how.format.name} delayed", base)
        return made

    def _transposed(self, by_rows: Node, left: bool) -> Node:
        """A copy by columns of codes: a kernel of its own that reads a byte for each element."""
        while by_rows.target in RESHAPES:
            by_rows = by_rows.args[0]  # type: ignore[assignment]

        def transpose(codes: Tensor) -> Tensor:
            return as_operand(by_columns(codes), left, True)

        node: Node = splice(self.graph, transpose, by_rows, before=insertion_point_after(by_rows))
        return node


def _is_made_in_rows(value: Node) -> bool:
    """Whether the kernel that makes ``value`` takes whole rows: sums along them are in it, or sums across them of its result.
    Such a kernel stores nothing across rows (fp8compile/compiler/row_kernels.py), and would leave to another kernel to make
    the value again."""
    if value.meta.get(ROW_BLOCKS, ALONG_ROWS).rows:
        return False
    return any(map(is_reduction, computed_from(value))) or any(map(is_reduction, readers(value)))


def encoding(codec: str, value: Node) -> Encoding:
    return Encoding(codec, dtype_text(value.meta["val"]), nbytes(value.meta["val"]))


def _is_computed(value: Node) -> bool:
    return value.op == "call_function" and not is_view(value)


def _feeds_matmuls_only(value: Node) -> bool:
    """If not, it is in memory anyway: the amax reads it there, and Inductor keeps no FP32 original in addition."""
    views, taking = RESHAPES | TRANSPOSES, {*PLAIN_MATMULS, aten.sum.dim_IntList}
    return all(u.target in taking or (u.target in views and _feeds_matmuls_only(u)) for u in value.users)
