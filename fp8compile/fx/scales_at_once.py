"""Scales of several amaxes as one operator: on a GPU a generated kernel for 16 at a time, which stores each by itself.

A scale is one number. By itself it takes a launch, and there is one for each weight of a model. Kernels of 16 have one text,
whatever the number of weights; a kernel of all would take long to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics.code_forms import FORMATS, INV_SCALE
from fp8compile.numerics.operators import operator
from fp8compile.numerics.scaling import BF16_HALF, BF16_MASK, exact_inv_scale

TOGETHER = 16


def _scales(amaxes: Sequence[Tensor], rounded: torch.dtype, fmt: torch.dtype) -> list[Tensor]:
    """FP32 inverse scales of amaxes that are first rounded to a dtype, for a format."""
    return [exact_inv_scale(amax.to(rounded), FORMATS[fmt], torch.float32) for amax in amaxes]


SCALES_AT_ONCE = operator(
    "scales_at_once(Tensor[] amaxes, ScalarType rounded, ScalarType dtype) -> Tensor[]",
    _scales,
    pointwise=False,
    result=lambda amaxes, *_: [torch.empty_like(amax, dtype=torch.float32) for amax in amaxes],
)


def _in_bf16(amax: Any) -> Any:
    """FP32 amaxes as BF16 has them. A cast there and back Inductor leaves out."""
    ops, fp32, bits = private.inductor_lowering.ops, torch.float32, torch.int32

    def form(value: Any) -> Any:
        value = ops.to_dtype(value, fp32)
        whole = ops.to_dtype_bitcast(value, bits, fp32)
        odd = ops.bitwise_and(ops.bitwise_right_shift(whole, ops.constant(16, bits)), ops.constant(1, bits))
        near = ops.bitwise_and(
            ops.add(ops.add(whole, ops.constant(BF16_HALF - 1, bits)), odd), ops.constant(BF16_MASK, bits)
        )
        is_finite = ops.lt(value, ops.constant(float("inf"), fp32))
        return ops.where(is_finite, ops.to_dtype_bitcast(near, fp32, bits), value)

    return private.inductor_lowering.make_pointwise(form, override_return_dtype=fp32)(amax)


def _in_one_kernel(amaxes: Sequence[Any], rounded: torch.dtype, fmt: torch.dtype) -> list[Any]:
    lowering, graph = private.inductor_lowering, private.inductor_virtualized.graph
    rounds = rounded == torch.bfloat16
    values = (_in_bf16(amax) if rounds and amax.get_dtype() == torch.float32 else amax for amax in amaxes)
    found = [lowering.lowerings[INV_SCALE](amax, fmt, torch.float32) for amax in values]
    for each in found:
        each.realize()
    names = [each.get_operation_name() for each in found if each.get_device().type == "cuda"]
    for at in range(0, len(names), TOGETHER):
        graph.register_operation_list(names[at : at + TOGETHER])
    return found


private.inductor_lowering.register_lowering(SCALES_AT_ONCE, type_promotion_kind=None)(_in_one_kernel)
