"""The table of rules: operation (all its overloads), rule, and the error of the result before it is rounded.

``EXACT`` where nothing is computed, 0 where the result is rounded to nearest or the rule adds the error of a sum, and
``FUNCTION_ERROR`` for other functions. An operation that is in no table gets (-inf, inf).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile.analysis.ranges.interval import FUNCTION_ERROR, ZERO, negated, times
from fp8compile.analysis.ranges.matching import of
from fp8compile.analysis.ranges.rules import (
    Rule,
    absolute,
    added,
    any_of,
    attended,
    binary,
    cast,
    clamped,
    counting,
    divided,
    drawn,
    dropped,
    exponential,
    exponential2,
    extreme,
    filled,
    first,
    fused,
    gate,
    increasing,
    joined,
    larger,
    padded,
    parts,
    picked,
    place,
    pooled,
    pooled_by_window,
    power,
    reciprocal,
    root,
    rsqrt,
    scattered,
    sine,
    smaller,
    sorted_,
    subtracted,
    unary,
    within,
)
from fp8compile.analysis.ranges.sums import (
    accumulated,
    averaged,
    convolved,
    matmul,
    product_and_sum,
    total,
    variance,
    variance_and_mean,
)

aten, prims = torch.ops.aten, torch.ops.prims
EXACT = None
MOVES = (
    aten.alias, aten.amax, aten.amin, aten.as_strided, aten.clone, aten.detach, aten.diagonal, aten.embedding, aten.expand,
    aten.flip, aten.gather, aten.index, aten.index_select, aten.lift_fresh_copy, aten.permute, aten.repeat, aten.reshape,
    aten.roll, aten.select, aten.slice, aten.squeeze, aten.t, aten.transpose, aten.unfold, aten.unsqueeze, aten.view,
    aten._unsafe_index, aten._unsafe_view, prims.rev,
)  # fmt: skip

# Nothing is computed: an element of the arguments.
_EXACT: dict[Any, Rule] = {
    **dict.fromkeys(MOVES, first),
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.unbind), parts),
    aten.sort: sorted_(1),
    aten.topk: sorted_(2),
    aten.max_pool2d_with_indices: pooled,
    prims._low_memory_max_pool_with_offsets: pooled_by_window,
    **dict.fromkeys((aten.argmax, aten.argmin), place),
    **dict.fromkeys((aten.cat, aten.stack), joined),
    **dict.fromkeys((aten.max, aten.min), extreme),
    aten.scalar_tensor: filled(0),
    **dict.fromkeys((aten.full, aten.full_like), filled(1)),
    **dict.fromkeys((aten.zeros, aten.zeros_like), within(0.0, 0.0)),
    **dict.fromkeys((aten.ones, aten.ones_like), within(1.0, 1.0)),
    **dict.fromkeys((aten.rand, aten.rand_like, prims.inductor_random), drawn),
    private.getitem: picked,
    prims.iota: counting,
    aten.where: any_of(1, 2),
    aten.slice_scatter: any_of(0, 1),
    aten.select_scatter: any_of(0, 1),
    aten.constant_pad_nd: padded,
    aten.scatter: scattered,
    aten.index_put: scattered,
    aten.neg: unary(negated),
    aten.abs: unary(absolute),
    aten.relu: unary(lambda x: larger(x, ZERO)),
    aten.maximum: binary(larger),
    aten.minimum: binary(smaller),
    aten.clamp: clamped,
    aten.clamp_min: clamped,
    aten.clamp_max: lambda node, known: smaller(of(known, node.args[0]), of(known, node.args[1])),
    aten.floor: increasing(math.floor, False),
    aten.ceil: increasing(math.ceil, False),
    aten.trunc: increasing(math.trunc, False),
    aten.round: increasing(round, False),
    aten.sign: within(-1.0, 1.0),
    aten.sgn: within(-1.0, 1.0),
}

_ATTENTION = (
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
)  # fmt: skip

# Rounded to nearest, or an error that the rule adds.
_ROUNDED: dict[Any, Rule] = {
    prims.convert_element_type: cast,
    aten._to_copy: cast,
    aten.add: added,
    aten.sub: subtracted,
    aten.mul: binary(times),
    aten.div: divided,
    prims.fma: fused,
    aten.reciprocal: unary(reciprocal),
    aten.sqrt: unary(root),
    aten.sum: total,
    aten.mean: averaged,
    aten.var: variance,
    aten.var_mean: variance_and_mean,
    aten.cumsum: accumulated,
    aten.mm: matmul,
    aten.bmm: matmul,
    aten.mv: matmul,
    aten.dot: matmul,
    aten.addmm: product_and_sum,
    aten.baddbmm: product_and_sum,
    aten.convolution: convolved,
    aten.native_dropout: dropped,
    **dict.fromkeys(_ATTENTION, attended),
}

_FUNCTIONS: dict[Any, Rule] = {
    aten.exp: unary(exponential),
    aten.exp2: unary(exponential2),
    aten.expm1: increasing(math.expm1),
    aten.log: increasing(math.log, False),
    aten.log2: increasing(math.log2, False),
    aten.log10: increasing(math.log10, False),
    aten.log1p: increasing(math.log1p),
    aten.rsqrt: unary(rsqrt),
    aten.pow: power,
    aten.tanh: increasing(math.tanh),
    aten.sigmoid: increasing(gate, False),
    aten.erf: increasing(math.erf),
    aten.atan: increasing(math.atan),
    aten.sin: unary(sine),
    aten.cos: within(-1.0, 1.0),
}

RULES: dict[object, tuple[Rule, float | None]] = {
    **{operation: (rule, EXACT) for operation, rule in _EXACT.items()},
    **{operation: (rule, 0.0) for operation, rule in _ROUNDED.items()},
    **{operation: (rule, FUNCTION_ERROR) for operation, rule in _FUNCTIONS.items()},
}

# Operations that mean the same on integers, as long as those do not wrap around.
INTEGERS = {
    *MOVES, aten.abs, aten.add, aten.argmax, aten.argmin, aten.cat, aten.clamp, aten.clamp_max, aten.clamp_min,
    aten.constant_pad_nd, aten.cumsum, aten.div, aten.full, aten.full_like, aten.index_put, aten.max, aten.maximum, aten.min,
    aten.minimum, aten.mul, aten.neg, aten.relu, aten.scalar_tensor, aten.scatter, aten.select_scatter, aten.slice_scatter,
    aten.stack, aten.sub, aten.sum, aten.where, aten.zeros, aten.zeros_like, aten._to_copy,
    private.getitem, prims.convert_element_type, prims.iota,
}  # fmt: skip
