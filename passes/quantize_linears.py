"""Numbers change: linears multiply FP8 or INT8 codes in all three matmuls (forward, dgrad, wgrad), with scales from tensors
themselves (current scaling).

A codec goes on both operands of every matmul of a linear; *a matmul of two decoded operands is a scaled matmul*:
``_scaled_mm`` where the device has FP8 matrix units, else decode-then-multiply with ``Recipe.emulate``. A value is
encoded once for each format and scaling axis and shared by all its uses: q, k and v read one encoding, the wgrad reads
the forward's. With tensorwise scales that encoding is of the value itself, whatever view of it a matmul takes.

Formats: E4M3 for activations and weights; gradients in E5M2 ("hybrid") or E4M3 ("e4m3"), or as named for dgrad and wgrad.
``linear="int8"`` has INT8 for all, scales along rows, and ``_int_mm`` (encoding/integer_matmuls.py). Scales of blocks
("blockwise", "mxfp8", "int8_blocks") are emulated only: encoding/block_operands.py.

Left as they are, each with its reason in the report: the output head (by path, marked by the user, tied to an embedding, or
the last linear of a whole model with four times as many outputs as inputs), what the user put in FP32 inside a 16-bit model,
FP32 islands, weights whose sides are not multiples of 16 (``_scaled_mm`` takes no others; LoRA), batched expert matmuls,
float64 and complex, inputs without rows, devices without such units unless emulated; with ``linear="auto"``, what FP8 is not
predicted to pay for.

A value that a nonlinear operation needs for its backward too is saved once, as *its* codes (groupwise, see encode_saved). The
wgrad encodes the decoded value again under the forward's scale. A value that only matmuls need is saved as their codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.analysis.dataflow import sources, user_fp32
from fp8compile.analysis.linears import (
    FORWARD,
    PLAIN_MATMULS,
    WGRAD,
    Matmul,
    is_last,
    is_tied_to_embedding,
    linear_matmuls,
    made_from,
)
from fp8compile.encoding.block_operands import BlockOperands, in_blocks, reason_against_blocks
from fp8compile.encoding.cached_weights import CachedWeights
from fp8compile.encoding.device import fp8_unsupported_reason, int8_unsupported_reason
from fp8compile.encoding.integer_matmuls import IN_INT8, INT8_MODE, product_of_codes, reason_against_integers
from fp8compile.encoding.known_scales import GRADIENT, INPUT, WEIGHT, KnownScales
from fp8compile.encoding.merged_dgrads import MergedDgrads, Quantized
from fp8compile.encoding.operands import Encoded, How, Operands
from fp8compile.encoding.paying import Paying
from fp8compile.encoding.row_blocks import take_in_blocks
from fp8compile.encoding.smooth_swiglu import SmoothSwiglu
from fp8compile.encoding.turned_wgrads import TurnedWgrads
from fp8compile.encoding.views import beneath
from fp8compile.fx.aot import is_training, plain_position
from fp8compile.fx.checkpointed import stand_in
from fp8compile.fx.graph import ROW, WIDENED, dtype_text, size_hint, splice
from fp8compile.fx.provenance import Origin, TensorInfo, module_path, op_name, source_line
from fp8compile.numerics import E4M3, E5M2, ENCODABLE, INT8
from fp8compile.numerics.formats import FP8_MULTIPLE
from fp8compile.numerics.scaling import may_be_empty
from fp8compile.recipe.context import Context
from fp8compile.recipe.linear_formats import gradient_format
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import LINEAR, Linear, Notes, Skip

aten = torch.ops.aten

# A last linear with so many times more outputs than inputs tells tokens or classes apart. An MLP's has 4 times as many, but
# is followed by another linear.
VOCABULARY = 4
UPCAST, ISLAND = "upcast by the user", "in an FP32 island"


def quantize_linears(graph: Graph, ctx: Context) -> Notes:
    """Make every matmul of a linear a matmul of codes, or say why not."""
    if not ctx.recipe.quantizes_linears or not is_training(graph):
        return Notes()  # in inference the model computes as it is written
    parameters = ctx.parameters_of(graph)
    judge = _Judge(graph, ctx, parameters)
    scales = KnownScales.of(graph, ctx)
    weights = CachedWeights(graph, ctx)
    operands = Operands(graph, scales, weights)
    blocks, turned = BlockOperands(graph, operands), TurnedWgrads(operands)
    linears, skips = list[Linear](), list[Skip]()
    matmuls = linear_matmuls(graph, parameters)
    paying = Paying(matmuls, lambda matmul: _recipe_of(matmul, ctx))
    judged = [(matmul, judge.reason_to_leave(matmul) or paying.reason_to_leave(matmul)) for matmul in matmuls]
    taken = {matmul.node for matmul, reason in judged if not reason}
    smooth = SmoothSwiglu(operands, matmuls, lambda matmul: _recipe_of(matmul, ctx), taken)
    take_in_blocks(*_known_operands([matmul for matmul, reason in judged if not reason], operands, ctx))
    merged = MergedDgrads(operands, [_quantized(matmul, operands, ctx) for matmul, reason in judged if not reason])
    for matmul, reason in judged:
        info, told = _info(matmul), smooth.told.get(matmul.node, "") + merged.told.get(matmul.node, "")
        if reason:
            skips.append(Skip(info, reason, LINEAR, matmul.direction))
            continue
        recipe, at_once = _recipe_of(matmul, ctx), matmul.node not in merged.taken
        told += turned.turn(matmul, recipe)
        if in_blocks(recipe):
            formats = _emulate_in_blocks(matmul, operands, blocks, recipe)
        else:
            formats = _rewrite(matmul, operands, recipe, at_once)
        M, K, N = map(_size, (matmul.M, matmul.K, matmul.N))
        linears.append(Linear(info, matmul.direction, M, K, N, formats + told, *paying.figures(matmul)))
    merged.rewrite()
    if scales:
        scales.promise()
    return Notes(linears=tuple(linears), skips=tuple(skips), weights=weights.told())


def _recipe_of(matmul: Matmul, ctx: Context) -> Recipe:
    return ctx.recipe_at(module_path(matmul.forward))


class _Judge:
    """Decides whether a linear must stay as it is, and why; its three matmuls share the verdict."""

    def __init__(self, graph: Graph, ctx: Context, parameters: Set[Node]) -> None:
        self.graph, self.ctx, self.parameters = graph, ctx, parameters
        self.upcast = user_fp32(graph, parameters)
        self.heads = made_from({p for p in parameters if plain_position(p) in ctx.place.heads})
        self._verdicts: dict[Node, str | None] = {}

    def reason_to_leave(self, matmul: Matmul) -> str | None:
        forward, recipe = matmul.forward, _recipe_of(matmul, self.ctx)
        if WIDENED in matmul.node.meta:
            return ISLAND
        if forward not in self._verdicts:
            self._verdicts[forward] = (
                self.ctx.skip_reason(module_path(forward), "linear", ("linear_skip", "skip"))
                or (matmul.weight in self.heads and "output head: fp8compile.mark_head")
                or (is_tied_to_embedding(matmul.weight) and "output head: its weight is tied to an embedding")
                or _not_a_plain_matmul(forward)
                or (forward in self.upcast and UPCAST)
                or _no_shape(matmul, recipe)
                or self._why_last(matmul)
                or _unsupported(forward.meta["val"].device, recipe)
                or None
            )
        return self._verdicts[forward] or _not_a_plain_matmul(matmul.node) or reason_against_integers(matmul, recipe)

    def _why_last(self, matmul: Matmul) -> str | None:
        """Why a linear is an output head although nothing names it so."""
        many = matmul.N >= VOCABULARY * matmul.K
        if many and self.ctx.is_whole_model and is_last(matmul, sources(self.graph, self.parameters)):
            return f"output head: the last linear, N={matmul.N} from K={matmul.K}"
        return None


def _not_a_plain_matmul(node: Node) -> str | None:
    if node.target not in PLAIN_MATMULS:
        return "a batched matmul of parameters (experts) is left in its dtype"
    if node.kwargs:
        return "addmm with alpha or beta"
    value = node.meta["val"]
    return None if value.dtype in ENCODABLE else f"{dtype_text(value)} is left alone"


def _unsupported(device: torch.device, recipe: Recipe) -> str | None:
    if recipe.emulate:
        return None
    return int8_unsupported_reason(device) if recipe.linear == INT8_MODE else fp8_unsupported_reason(device)


def _no_shape(matmul: Matmul, recipe: Recipe) -> str | None:
    for name in () if recipe.linear in IN_INT8 else ("K", "N"):
        if (size := getattr(matmul, name)) % FP8_MULTIPLE:
            return f"{name}={size} is not a multiple of {FP8_MULTIPLE}"
    if size_hint(matmul.M) == 0:
        return "no rows"
    if (why := reason_against_blocks(matmul, recipe)) or recipe.linear in IN_INT8:
        return why
    if not recipe.emulate and may_be_empty(matmul.M):
        return "rows that only a run counts: _scaled_mm takes no matmul without rows"
    bf16 = matmul.forward.meta["val"].dtype == torch.bfloat16
    if recipe.linear == "rowwise" and not recipe.emulate and not bf16:
        return "_scaled_mm with rowwise scales gives BF16 only"
    return None


def _quantized(matmul: Matmul, operands: Operands, ctx: Context) -> Quantized:
    recipe = _recipe_of(matmul, ctx)
    return Quantized(matmul, _hows(matmul, operands, recipe), recipe.emulate, recipe.merge_dgrads)


def _rewrite(matmul: Matmul, operands: Operands, recipe: Recipe, at_once: bool) -> str:
    """Replace a matmul by the matmul of its decoded operands, unless it is merged later; returns the operands' formats."""
    hows = _hows(matmul, operands, recipe)
    sides = tuple(zip(matmul.operands, ("left", "right"), hows, strict=True))
    if at_once and recipe.emulate:
        at = PLAIN_MATMULS[matmul.node.target]
        for i, (operand, side, how) in enumerate(sides):
            matmul.node.update_arg(at + i, operands.decoded(operand, side, how))
    elif at_once:
        left, right = (operands.codes(*side) for side in sides)
        _multiply_codes(matmul, left, right, recipe)
    known = recipe.linear_scaling == "delayed" and all(operands.is_known(*side) for side in sides)
    cached = ", cached weight" if any(operands.is_cached(*side) for side in sides) else ""
    formats = f"{hows[0].format.name} x {hows[1].format.name} {'delayed' if known else recipe.scaling_mode}{cached}"
    return f"{formats}, emulated" if recipe.emulate else formats


def _emulate_in_blocks(matmul: Matmul, operands: Operands, blocks: BlockOperands, recipe: Recipe) -> str:
    """As ``_rewrite``, where scales are those of blocks."""
    left, right = (how.format for how in _hows(matmul, operands, recipe))
    at, sides = PLAIN_MATMULS[matmul.node.target], zip(matmul.operands, matmul.weights, strict=True)
    for i, (operand, is_weight) in enumerate(tuple(sides)):
        side, fmt = ("right", right) if i else ("left", left)
        matmul.node.update_arg(at + i, blocks.decoded(operand, side, recipe.linear, fmt, is_weight))
    return f"{left.name} x {right.name} {recipe.linear}, emulated"


def _hows(matmul: Matmul, operands: Operands, recipe: Recipe) -> tuple[How, How]:
    """How the two operands of a matmul are encoded."""
    gradient = E5M2 if gradient_format(recipe.linear_formats, matmul.direction) == E5M2.name else E4M3
    delayed = recipe.linear_scaling == "delayed" and operands.scales is not None
    right = INPUT if matmul.direction == WGRAD else WEIGHT
    roles = [
        GRADIENT if is_gradient else each for is_gradient, each in zip(matmul.gradients, (INPUT, right), strict=True)
    ]
    rowwise, where = recipe.scaling_mode == "rowwise", module_path(matmul.forward)
    cached, of_gradient = recipe.cache_weights and not rowwise, {GRADIENT: gradient}
    left, right_ = (
        How(
            INT8 if recipe.linear in IN_INT8 else of_gradient.get(role, E4M3),
            *(rowwise, delayed, cached and role != GRADIENT, role, where),
        )
        for role in roles
    )
    return left, right_


def _known_operands(
    matmuls: Sequence[Matmul], operands: Operands, ctx: Context
) -> tuple[dict[Node, int | None], dict[Node, int | None]]:
    """The gradients under known scales, and the inputs, each with the width of its matrix."""
    found: dict[str, dict[Node, int | None]] = {GRADIENT: {}, INPUT: {}, WEIGHT: {}}
    for matmul in matmuls:
        hows = _hows(matmul, operands, _recipe_of(matmul, ctx))
        for operand, side, how in zip(matmul.operands, ("left", "right"), hows, strict=True):
            if how.delayed and not how.rowwise:
                value, width, *_ = beneath(operand, side, how.rowwise)
                found[how.role][value] = width
    return found[GRADIENT], found[INPUT]


def _multiply_codes(matmul: Matmul, left: Encoded, right: Encoded, recipe: Recipe) -> None:
    """Put the product of the operands' codes in a matmul's place."""
    node = matmul.node
    bias = node.args[0] if node.target is aten.addmm.default else None
    more = (bias,) if isinstance(bias, Node) else ()
    nodes = (left.codes, right.codes, left.inv_scale, right.inv_scale, *more)
    fn = product_of_codes(node.meta["val"].dtype) if recipe.linear == INT8_MODE else _scaled_product(matmul, *more)
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


def _info(matmul: Matmul) -> TensorInfo:
    """The matmul's result; its origin is the linear's forward."""
    where = Origin(op_name(matmul.forward), module_path(matmul.forward), source_line(matmul.forward))
    return dataclasses.replace(TensorInfo.of(matmul.node), origin=where)


def _size(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(size)
