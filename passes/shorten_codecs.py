"""Numbers change: a scale's reciprocal in its last bit, no others. Arithmetic of codecs in the short forms of a GPU.

    clamp(x, -limit, limit)               fp8compile.within             two instructions an element, not six
    clamp(.).to(float8)                   fp8compile.codes_of           half an instruction, not seven: it saturates
    round(.).clamp(-127, 127).to(int8)    fp8compile.codes_of           three, not ten, and none of the slow pipe's
    amax(|x|)                             of fp8compile.magnitude_bits  two, not four: integers in the order of magnitudes
    1 / inv_scale                         fp8compile.near_reciprocal    two, not eight, each time a kernel needs it
    codes_of(x * (1 / inv_scale), .)      fp8compile.quantized          one node of the graph; so each is looked at once
    amax / max, bounded and rounded       fp8compile.inv_scale          one node

On a GPU a kernel takes the longer of its bytes and its instructions, and a codec's are as many as its neighbours': a ViT's
GELU with codes took 51 an element, of which 36 are GELU's, and takes 43. Only what passes splice is rewritten, never the
user's arithmetic. Only on an NVIDIA GPU: elsewhere torch's own functions are what these forms are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx import code_lowerings as code_lowerings  # tells Inductor
from fp8compile.fx.graph import SPLICED, is_tensor, splice
from fp8compile.numerics.code_forms import (
    CODES_OF,
    FORMATS,
    INV_SCALE,
    MAGNITUDE_BITS,
    MAGNITUDES,
    QUANTIZED,
    WITHIN,
)
from fp8compile.numerics.codecs import ENCODABLE
from fp8compile.numerics.near_functions import OPERATORS
from fp8compile.numerics.scaling import BF16_HALF, BF16_MASK, SMALLEST_INV_SCALE
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


def shorten_codecs(graph: Graph, ctx: Context) -> Notes:
    """Put the short forms in place of what codecs compute on a GPU."""
    for node in reversed([node for node in graph.nodes if SPLICED in node.meta and _on_a_gpu(node)]):
        if (shorten := _FORMS.get(node.target)) and node.users:
            shorten(node)
        if not node.users and not node.is_impure():  # a conversion was met before the clamp that it makes needless
            graph.erase_node(node)
    return Notes()


def _on_a_gpu(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].device.type == "cuda"


def _codes(node: Node) -> None:
    """A conversion of what is held within the format's limits; for integers, of what is rounded besides."""
    held, dtype = node.args
    fmt = FORMATS.get(dtype)  # type: ignore[arg-type]
    if fmt is None or not isinstance(held, Node) or (found := _held(held)) is None or found[1] != fmt.max:
        return
    value = found[0]
    if not fmt.is_float:
        if value.target is not aten.round.default:
            return
        value = value.args[0]  # type: ignore[assignment]
    node.target, node.args = CODES_OF, (value, dtype)
    if factors := _scaled(value):
        node.target, node.args = QUANTIZED, (*factors, dtype)


def _scaled(value: Node) -> tuple[Node, Node] | None:
    """``(x, inv_scale)`` of ``x.float() * inv_scale.reciprocal()``."""
    if value.target is not aten.mul.Tensor or SPLICED not in value.meta or not is_tensor(value):
        return None
    x, inverse = value.args
    inv_scale = _operand(inverse, aten.reciprocal.default)
    if inv_scale is None or not isinstance(x, Node) or x.meta["val"].shape != value.meta["val"].shape:
        return None
    are_fp32 = x.meta["val"].dtype is inv_scale.meta["val"].dtype is torch.float32
    return (_before_cast(x), inv_scale) if are_fp32 else None


def _before_cast(value: Node) -> Node:
    """What was cast to FP32 by a codec, or the value itself."""
    return _operand(value, torch.ops.prims.convert_element_type.default, torch.float32) or value


def _inv_scale(node: Node) -> None:
    """``where(amax < inf, bounded, nan)``, as numerics/scaling.py: exact_inv_scale makes it."""
    (is_finite, bounded, nan), scale_dtype = node.args, torch.float32
    if rounded := _operand(bounded, aten.view.dtype, torch.float32):
        bits = _operand(_operand(rounded, aten.bitwise_and.Scalar, BF16_MASK), aten.add.Tensor, BF16_HALF)
        bounded, scale_dtype = _operand(bits, aten.view.dtype, torch.int32), torch.bfloat16
    share = _operand(bounded, aten.clamp_min.default, SMALLEST_INV_SCALE)
    amax = _operand(is_finite, aten.lt.Scalar, torch.inf)
    is_nan = isinstance(nan, Node) and nan.target is aten.scalar_tensor.default and nan.args[0] != nan.args[0]
    if share is None or amax is None or not is_nan:
        return
    for dtype, fmt in FORMATS.items():
        if _operand(share, aten.mul.Tensor, 1.0 / fmt.max) is amax:
            node.target, node.args = INV_SCALE, (_before_cast(amax), dtype, scale_dtype)


def _operand(value: object, target: object, *others: object) -> Node | None:
    """The first argument of a spliced operation with these other ones; None for anything else."""
    if not isinstance(value, Node) or value.target is not target or SPLICED not in value.meta:
        return None
    if value.args[1:] != others or value.kwargs:
        return None
    return value.args[0] if isinstance(value.args[0], Node) else None


def _within(node: Node) -> None:
    if found := _held(node):
        node.target, node.args = WITHIN, found


def _held(node: Node) -> tuple[Node, float] | None:
    """``(x, limit)`` of ``x.clamp(-limit, limit)``, an FP32 number that is held within a limit on both sides."""
    if node.target is not aten.clamp_max.default or node.meta["val"].dtype is not torch.float32:
        return None
    inner, most = node.args
    if not isinstance(inner, Node) or inner.target is not aten.clamp_min.default or not isinstance(most, float):
        return None
    value, least = inner.args
    return (value, most) if isinstance(value, Node) and most > 0 and least == -most else None


def _amax(node: Node) -> None:
    magnitude, dtype, dims = node.args[0], node.meta["val"].dtype, node.args[1:]
    if not isinstance(magnitude, Node) or magnitude.target is not aten.abs.default:
        return
    if dtype not in ENCODABLE or node.kwargs:
        return

    def amax_of_bits(x: Tensor) -> Tensor:
        return MAGNITUDE_BITS(x).amax(*dims)  # type: ignore[no-any-return]

    largest = splice(node.graph, amax_of_bits, magnitude.all_input_nodes[0], before=node)
    node.target, node.args = MAGNITUDES, (largest, dtype)


def _reciprocal(node: Node) -> None:
    if node.meta["val"].dtype is torch.float32:
        node.target = OPERATORS["reciprocal"]


_FORMS: dict[object, Callable[[Node], None]] = {
    torch.ops.prims.convert_element_type.default: _codes,
    aten.clamp_max.default: _within,
    aten.amax.default: _amax,
    aten.reciprocal.default: _reciprocal,
    aten.where.self: _inv_scale,
}
