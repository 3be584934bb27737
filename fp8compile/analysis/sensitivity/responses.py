"""How operations respond to a rounded operand: the allow-list of the sensitivity analysis, each entry with its argument.

A code is off by at most an error e of its group's largest magnitude (INT8: 1/254) or of the element itself (E4M3: 1/16).
What an operation makes of that, by class:

    MOVES        the same elements elsewhere, or zeros beside them               the error moves along
    PRODUCTS     linear in each operand by itself                                relative errors add up
    SUMS         linear                                                          off by e of the sum of magnitudes
    NON_EXPANSIVE, CLAMPS  |f(x) - f(y)| <= |x - y|                              no larger than before
    SETTLING     |f'| <= 1.13, |x f'(x)| <= 1: f is flat where x is large        off by e of f's own range
    PHASES       |f'| <= 1, but as steep far from 0 as near it                   bounded where the operand's range is
    EXPONENTIALS relative error = absolute error of the operand                  bounded where the operand's range is
    POLES        steep near a pole                                               bounded where the operand stays away from it
    COMPARISONS  differ only where the two sides are nearer than their error     see the head of this package
    ATTENTION    softmax(q k') from the logits' own maximum and sum              see below

Left out on purpose, and so exact: eq and ne (a maximum finds its element by x == amax(x): a rounded x finds none), floor,
round, trunc and casts to integers (steps of any height downstream), sort, topk, argmax (an index has no neighbours), prod
and cumprod (their backward divides), atan2, fmod and remainder, sampling at computed places (grid_sample floors), reductions
over ranks that are no sums, functions of complex numbers but for OF_COMPLEX (rotary embeddings).
What is not listed is not known, and stays exact, with its name in the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.analysis.ranges.matching import packet
from fp8compile.fx.graph import is_tensor, numel

aten, prims = torch.ops.aten, torch.ops.prims


def _packets(namespace: object, names: str) -> frozenset[object]:
    """Operations by name, those that this torch has; all functional overloads of one behave alike."""
    found: Iterable[object] = (getattr(namespace, name, None) for name in names.split())
    return frozenset(each for each in found if each is not None)


# The result holds elements of the operand, copies of them, or constants that depend on no element.
MOVES_WITHIN = _packets(
    aten,
    "alias as_strided as_strided_copy clone contiguous copy detach diagonal diag_embed expand expand_copy flip lift_fresh"
    " permute pixel_shuffle pixel_unshuffle ravel repeat reshape roll rot90 select select_backward slice slice_backward split"
    " split_with_sizes squeeze t transpose unbind unfold unsqueeze view _unsafe_view _reshape_alias narrow chunk tril triu"
    " diagonal_backward constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
    " replication_pad2d replication_pad3d _unsafe_masked_index index_select gather index"
    " _unsafe_index embedding take _to_copy",
) | _packets(prims, "convert_element_type device_put broadcast_in_dim transpose view_of")
# Pairs of real numbers as complex ones, and back.
PAIRS = _packets(aten, "view_as_complex view_as_real _conj conj _conj_physical resolve_conj")
# Between ranks that run the same program: what comes from another rank has the same codec's error, of its own group.
FROM_RANKS = _packets(private.collectives, "wait_tensor all_gather_into_tensor all_to_all_single")
MOVES = MOVES_WITHIN | PAIRS | FROM_RANKS

# Combinations of operands, element by element or in other places; each element of the result is one of an operand.
JOINS = _packets(aten, "cat stack select_scatter slice_scatter diagonal_scatter as_strided_scatter scatter")

# f(a x, y) = a f(x, y), and so in each operand that carries values: (1 + k1 e)(1 + k2 e) - 1 is about (k1 + k2) e.
# Contractions are sums of such products, whose error is measured by the sum of magnitudes: a sum that cancels is as
# ill-conditioned in the model's own dtype.
PRODUCTS = _packets(aten, "mul square addcmul dot mv ger outer") | _packets(prims, "fma mul")
SQUARES = _packets(aten, "square")
CONTRACTIONS = _packets(
    aten,
    "mm addmm bmm baddbmm addbmm addmv linear matmul einsum convolution convolution_backward _convolution conv1d conv2d"
    " conv3d _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm conv_transpose2d addr",
)

# A sum over ranks is a sum over one more dimension.
SUMS_OVER_RANKS = _packets(private.collectives, "all_reduce reduce_scatter_tensor")

# Linear: sums of elements with weights that do not depend on any element.
SUMS = SUMS_OVER_RANKS | _packets(
    aten,
    "_unsafe_masked_index_put_accumulate"
    " sum mean cumsum trace index_add scatter_add index_put _unsafe_index_put embedding_dense_backward unfold_backward im2col"
    " col2im avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d"
    " _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_avg_pool1d"
    " max_pool2d_with_indices_backward max_pool3d_with_indices_backward max_unpool2d upsample_nearest1d upsample_nearest2d"
    " upsample_nearest3d upsample_nearest2d_backward upsample_nearest1d_backward upsample_nearest3d_backward"
    " upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_bilinear2d_backward upsample_linear1d_backward"
    " upsample_bicubic2d_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward"
    " replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
)
NEGATIONS = _packets(aten, "neg") | _packets(prims, "neg")
ADDITIONS = NEGATIONS | _packets(aten, "add sub rsub") | _packets(prims, "add sub")
LINEAR = MOVES | JOINS | PRODUCTS | CONTRACTIONS | SUMS | ADDITIONS

# A complex number is a pair, and its product (a + bi)(c + di) a sum of two products each in ac - bd and ad + bc.
OF_COMPLEX = MOVES | JOINS | ADDITIONS | _packets(aten, "mul")

# |f(x) - f(y)| <= |x - y|: a maximum of several operands moves by no more than they do.
NON_EXPANSIVE = _packets(aten, "relu abs maximum minimum amax amin")

CLAMPS = _packets(aten, "clamp clamp_min clamp_max hardtanh")  # non-expansive, and flat beyond their bounds

# Steepness and the largest |x f'(x)|:  tanh 1, 0.45; sigmoid 0.25, 0.22; erf 1.13, 0.48; atan 1, 0.5; asinh 1, 1. A relative
# error r of x becomes at most r |x f'(x)|; an absolute one at most |f'| times it. Odd functions keep small values relative.
SETTLING_ODD = _packets(aten, "tanh erf atan asinh")
SETTLING = SETTLING_ODD | _packets(aten, "sigmoid erfc")

PHASES = _packets(aten, "sin cos")
EXPONENTIALS = _packets(aten, "exp exp2 expm1 sinh cosh")

# The operation and where its pole is. |f(x') / f(x)| or |f(x') - f(x)| is at most d / (d - e) for a distance d from the pole;
# sqrt, log and powers below 1 are no steeper than the reciprocal there.
POLES: dict[object, float] = {
    op: pole
    for pole, names in ((0.0, "reciprocal rsqrt sqrt log log2 log10"), (-1.0, "log1p"))
    for op in _packets(aten, names)
}

COMPARISONS = _packets(aten, "gt ge lt le")
EXTREMA = _packets(aten, "amax amin max min aminmax topk sort kthvalue median nanmedian mode cummax cummin")
STEPS = _packets(aten, "sign sgn signbit")  # comparisons with 0
LOGIC = _packets(
    aten, "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor"
)

MUL, DIV, SUB, POW = aten.mul, aten.div, aten.sub, aten.pow
EQUALITIES = _packets(aten, "eq ne")
CHOICES = _packets(aten, "where")  # linear in what is chosen between; the condition is a step

# Ops that read the shape of an operand, none of its elements.
SHAPE_ONLY = _packets(
    aten,
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided rand_like randn_like"
    " randint_like sym_size sym_numel sym_stride sym_storage_offset empty_permuted",
)
# Operands of which the kernel uses only the shape: it works with indices, or with the gradient alone.
SHAPE_OPERANDS: dict[object, tuple[int, ...]] = {
    op: (1,)
    for op in _packets(
        aten,
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward"
        " _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward reflection_pad1d_backward reflection_pad2d_backward"
        " reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
    )
}

# Bounded functions that are written with exp and log: within one of them an exponential or a quotient counts as SETTLING,
# since the function has a slope of at most 1.13 and settles: |x f''(x)| <= 1 of what its backward computes. selu and celu
# are elu.
BOUNDED = (
    "gelu",
    "silu",
    "softplus",
    "elu",
    "selu",
    "celu",
    "mish",
    "log_sigmoid",
    "sigmoid",
    "tanh",
    "hardswish",
    "hardsigmoid",
)

getitem = private.getitem


def is_as_large(operand: Node, node: Node) -> bool:
    """Whether an operand has a number of its own for each element of the result."""
    return is_tensor(operand) and numel(operand.meta["val"]) == numel(node.meta["val"])


def is_of_norm(node: Node) -> bool:
    """Whether a node is a part of a layer, group, batch or RMS norm of torch's."""
    return "norm" in str(node.meta.get("original_aten", ""))


# Fused attention's backward makes P = exp(s q k' - L) again, where L, the logits' logsumexp, was saved exactly: P is off by
# the factor exp(d), d the error of a logit: bounded by 2 e s |q| |k|, no more. Logits of a softmax that is not one-hot are
# within some tens, so d is some tenths at most in INT8, whose errors along a head's channels are independent of each other.
# That is an argument of size, not a proof: why attention_format is INT8, and why Recipe.saved.attention can be switched off.
# It is linear in the gradient, its first operand.
def takes_as_gradient(attention: Node, operand: Node) -> bool:
    """Whether an operand of fused attention's backward is the gradient alone."""
    return (
        attention.args[0] is operand
        and operand not in attention.args[1:]
        and operand not in attention.kwargs.values()
    )


def is_number(value: object) -> TypeGuard[float]:
    """Whether an argument is a constant of the graph."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def edge_of(comparison: Node, value: Node) -> float | Node:
    """What ``value`` is compared with: a number, or another tensor."""
    if packet(comparison) in STEPS:
        return 0.0
    other = next((a for a in comparison.args[:2] if a is not value), value)
    if isinstance(other, Node):
        return other.args[1] if other.target is aten.full.default and is_number(other.args[1]) else other
    return float(other) if isinstance(other, (int, float)) else value


def clamped_width(node: Node) -> float:
    """The distance between the bounds within which a clamp, or a pair of them, changes nothing; inf with one bound."""
    bounds = {name: value for name, value in zip(("min", "max"), node.args[1:3], strict=False)}
    if node.target is not aten.clamp.default and len(bounds) == 1:
        bounds = {"max" if "max" in str(node.target) else "min": node.args[1]}
    inner = node.args[0]
    if (
        len(bounds) == 1
        and isinstance(inner, Node)
        and inner.target in (aten.clamp_min.default, aten.clamp_max.default)
    ):
        bounds["max" if inner.target is aten.clamp_max.default else "min"] = inner.args[1]
    low, high = bounds.get("min"), bounds.get("max")
    return abs(high - low) if is_number(low) and is_number(high) else math.inf


def casts_to_integer(node: Node) -> bool:
    """Whether integers are made of other values, which have steps of any height; masks are followed as steps.

    Integers made of integers, such as views of INT8 codes, are followed from the cast that made those.
    """
    given = (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return _holds_integers(node) and not all(map(_holds_integers, given))


def _holds_integers(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_complex(node):
        return False
    return not value.dtype.is_floating_point and value.dtype != torch.bool


def is_complex(node: Node) -> bool:
    """Whether a value is a tensor of complex numbers."""
    return isinstance(value := node.meta.get("val"), torch.Tensor) and value.dtype.is_complex


def is_as_its_class(node: Node) -> bool:
    """Whether what is said of an operation's class holds for these operands: real ones, or pairs; over ranks, a sum."""
    if packet(node) in SUMS_OVER_RANKS and node.args[1] not in ("sum", "avg"):
        return False
    return packet(node) in OF_COMPLEX or not any(map(is_complex, (node, *node.all_input_nodes)))


def passes_on(node: Node) -> bool:
    """Whether an operation makes an error no larger than it was."""
    op = packet(node)
    return op in MOVES | JOINS | NON_EXPANSIVE | CHOICES and is_as_its_class(node) and not casts_to_integer(node)


def function_of(node: Node) -> tuple[str, object] | None:
    """The bounded function that a node is a part of, in the forward or the backward (BOUNDED)."""
    original = node.meta.get("original_aten")
    name = str(getattr(original, "overloadpacket", original or "")).removeprefix("aten.")
    name = name.removesuffix("_backward").removesuffix("_forward")
    return (name, node.meta.get("seq_nr")) if name in BOUNDED else None


def reads_shape_only(reader: Node, operands: Sequence[Node]) -> bool:
    """Whether an operation reads of these operands their shapes alone."""
    if packet(reader) in SHAPE_ONLY:
        return True
    at = SHAPE_OPERANDS.get(packet(reader), ())
    return bool(at) and all(i in at for i, a in enumerate(reader.args) if a in operands)
