"""Matmuls of codes in the place of matmuls: by ``_scaled_mm`` and ``_int_mm``, or emulated, as decode-then-multiply."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.analysis.linears import PLAIN_MATMULS, Matmul
from fp8compile.fx.checkpointed import stand_in
from fp8compile.fx.graph import ROW, splice
from fp8compile.fx.ops import FORWARD
from fp8compile.linears.block_operands import BlockOperands
from fp8compile.linears.integer_matmuls import INT8_MODE, product_of_codes
from fp8compile.linears.operands import Encoded, Operands
from fp8compile.linears.plan import Apply
from fp8compile.recipe.recipe import Recipe

aten = torch.ops.aten


def rewrite(each: Apply, operands: Operands, *, at_once: bool) -> str:
    """Replace a matmul by the matmul of its decoded operands, unless it is merged later; returns the operands' formats."""
    matmul, recipe, specs = each.matmul, each.recipe, each.specs
    sides = tuple(zip(matmul.operands, ("left", "right"), specs, strict=True))
    if at_once and recipe.linears.emulate:
        at = PLAIN_MATMULS[matmul.node.target]
        for i, (operand, side, spec) in enumerate(sides):
            matmul.node.update_arg(at + i, operands.decoded(operand, side, spec))
    elif at_once:
        left, right = (operands.codes(*side) for side in sides)
        _multiply_codes(matmul, left, right, recipe)
    known = recipe.linears.scaling == "delayed" and all(operands.is_known(*side) for side in sides)
    cached = ", cached weight" if any(operands.is_cached(*side) for side in sides) else ""
    formats = f"{specs[0].format.name} x {specs[1].format.name} {'delayed' if known else recipe.scaling_mode}{cached}"
    return f"{formats}, emulated" if recipe.linears.emulate else formats


def rewrite_in_blocks(each: Apply, blocks: BlockOperands) -> str:
    """The same where scales are those of blocks, which is always emulated."""
    matmul, mode = each.matmul, each.recipe.linears.mode
    left, right = (spec.format for spec in each.specs)
    at, sides = PLAIN_MATMULS[matmul.node.target], zip(matmul.operands, matmul.weights, strict=True)
    for i, (operand, is_weight) in enumerate(tuple(sides)):
        side, fmt = ("right", right) if i else ("left", left)
        matmul.node.update_arg(at + i, blocks.decoded(operand, side, mode, fmt, is_weight))
    return f"{left.name} x {right.name} {mode}, emulated"


def _multiply_codes(matmul: Matmul, left: Encoded, right: Encoded, recipe: Recipe) -> None:
    """Put the product of the operands' codes in a matmul's place."""
    node = matmul.node
    bias = node.args[0] if node.target is aten.addmm.default else None
    more = (bias,) if isinstance(bias, Node) else ()
    nodes = (left.codes, right.codes, left.inv_scale, right.inv_scale, *more)
    fn = (
        product_of_codes(node.meta["val"].dtype)
        if recipe.linears.mode == INT8_MODE
        else _scaled_product(matmul, *more)
    )
    put_in_place(node, fn, *nodes)


def put_in_place(node: Node, fn: Callable[..., Tensor], *nodes: Node) -> None:
    """Put ``fn`` of some nodes in another node's place."""
    product = splice(node.graph, fn, *nodes, before=node)
    product.meta.update({ROW: node.meta[ROW]} if ROW in node.meta else {})
    stand_in(product, node)
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)


def _scaled_product(matmul: Matmul, bias: Node | None = None) -> Callable[..., Tensor]:
    dtype = matmul.node.meta["val"].dtype
    fast = matmul.direction == FORWARD  # as torchao and Transformer Engine: gradients accumulate in full FP32
    added = None if bias is None else bias.meta["val"]
    fused = added is not None and added.dim() == 1 and dtype == added.dtype != torch.float32

    def scaled_mm(a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, *bias: Tensor) -> Tensor:
        first = bias[0] if bias and fused else None
        if inv_a.dim() != inv_b.dim():  # one of them known before
            inv_a, inv_b = inv_a.reshape(1, 1), inv_b.reshape(1, 1)
        y = torch._scaled_mm(a, b, inv_a, inv_b, bias=first, out_dtype=dtype, use_fast_accum=fast)
        return y + bias[0] if bias and not fused else y

    return scaled_mm
