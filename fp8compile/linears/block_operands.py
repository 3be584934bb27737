"""Operands of matmuls as codes in blocks, emulated: "blockwise" and "mxfp8" (numerics/blocks.py).

    operand       blockwise                                   mxfp8
    activation    1 x 128 along K (forward), M (wgrad)        1 x 32, along the same
    gradient      1 x 128 along N (dgrad), M (wgrad)          1 x 32, along the same
    weight        128 x 128, one encoding for both matmuls    1 x 32 along K (forward), N (dgrad)

An encoding is of the value under the views that a matmul takes, as a matrix, and is shared by all who contract it along the
same dimension in the same format.

Nothing here makes a matmul of codes for a device. torch has one (``torch.nn.functional.scaled_mm``; cuBLAS has 1 x 128 by
128 x 128, and 1 x 128 by 1 x 128, on sm_90). But Inductor 2.13, lowering for sm_90, calls ``_scaled_mm`` in its place, hands
over the scales in the layout that ``scaled_mm`` asks for (K / 128 filled up to a multiple of 4) and not their kinds, which
``_scaled_mm`` tells by shapes without such filling. It refuses MXFP8's swizzled scales (tests/test_canary.py). None of these
calls has been run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.analysis.linears import Matmul
from fp8compile.fx.graph import ENCODING, insertion_point_after, splice
from fp8compile.linears.operands import Operands, encoding
from fp8compile.linears.views import beneath, is_across, later
from fp8compile.numerics import Blocks, Format
from fp8compile.numerics.blocks import BLOCK, MX_BLOCK
from fp8compile.numerics.scaling import E8M0
from fp8compile.recipe.recipe import Recipe
from fp8compile.recipe.validation import IN_BLOCKS

BLOCKWISE = "blockwise"
EMULATED_ONLY = "{} scales are emulated only (linears.emulate=True decodes and multiplies, on any device)"
ROWS_VARY = "rows that vary from call to call: {} scales run along them in the wgrad"


def in_blocks(recipe: Recipe) -> bool:
    """Whether a recipe's linears have scales of blocks."""
    return recipe.linears.mode in IN_BLOCKS


def reason_against_blocks(matmul: Matmul, recipe: Recipe) -> str | None:
    """Why a linear cannot have scales of blocks, where its recipe asks for them."""
    if not in_blocks(recipe):
        return None
    if not recipe.linears.emulate:
        return EMULATED_ONLY.format(recipe.linears.mode)
    return None if isinstance(matmul.M, int) else ROWS_VARY.format(recipe.linears.mode)


def codec_of(mode: str, fmt: Format, is_weight: bool, axis: int) -> Blocks:
    """The codec of an operand, a matrix that is contracted along ``axis``."""
    if mode == BLOCKWISE and is_weight:
        return Blocks(fmt, BLOCK, BLOCK)
    length, scale_dtype = (BLOCK, torch.float32) if mode == BLOCKWISE else (MX_BLOCK, E8M0)
    return Blocks(fmt, 1, length, scale_dtype) if axis == 1 else Blocks(fmt, length, 1, scale_dtype)


@dataclass(frozen=True)
class _Value:
    """What is encoded: a value as a matrix of this width (None: it is one)."""

    base: Node
    width: int | None


class BlockOperands:
    """The operands of one graph in blocks; ``others`` repeats views for both."""

    def __init__(self, graph: Graph, others: Operands) -> None:
        self.graph, self._others = graph, others
        self._decoded: dict[tuple[_Value, Blocks], Node] = {}

    def decoded(self, operand: Node, side: str, mode: str, fmt: Format, is_weight: bool) -> Node:
        """``operand`` encoded and decoded: the operand of an emulated matmul."""
        base, width, views, _ = beneath(operand, side, False)
        axis = int((side == "left") != is_across(views))
        value, codec = _Value(base, width), codec_of(mode, fmt, is_weight, axis)
        if (value, codec) not in self._decoded:
            self._decoded[value, codec] = self._encoded_and_decoded(value, codec)
        return self._others.with_views(self._decoded[value, codec], views)

    def _encoded_and_decoded(self, value: _Value, codec: Blocks) -> Node:
        base, width, dtype = value.base, value.width, value.base.meta["val"].dtype

        def encode(x: Tensor) -> tuple[Tensor, Tensor]:
            return codec.encode(x if width is None else x.reshape(-1, width))

        def decode(codes: Tensor, inv_scale: Tensor) -> Tensor:
            return codec.decode(codes, inv_scale, dtype)

        codes, inv_scale = splice(self.graph, encode, base, before=insertion_point_after(base))
        codes.meta[ENCODING] = inv_scale.meta[ENCODING] = encoding(codec.name, base)
        after = insertion_point_after(later(codes, inv_scale))
        decoded: Node = splice(self.graph, decode, codes, inv_scale, before=after)
        return decoded
