"""What Inductor makes of the operators of ``numerics/code_forms.py``: an NVIDIA GPU's instructions, else torch's own."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile.fx.near_lowerings import instructing, is_nvidia
from fp8compile.numerics import code_forms
from fp8compile.numerics.code_forms import FORMATS
from fp8compile.numerics.near_functions import OPERATORS
from fp8compile.numerics.scaling import BF16_HALF, BF16_MASK, SMALLEST_INV_SCALE

aten = torch.ops.aten
SATURATING = (8, 9)  # the first GPUs whose conversion to FP8 saturates
TO_INTEGER = 1.5 * 2.0**23  # x plus this has x rounded, to even, in its last bits
WITHIN = "{{.reg .f32 y; max.NaN.f32 y, $1, {least}; min.NaN.f32 $0, y, {most};}}"
ROUNDED = (
    "{{.reg .f32 y; max.f32 y, $1, {least}; min.f32 y, y, {most}; add.rn.f32 y, y, {to_integer}; mov.b32 $0, y;}}"
)


def as_ptx(number: float) -> str:
    """An FP32 number as PTX writes it."""
    return f"0f{struct.unpack('>I', struct.pack('>f', number))[0]:08X}"


def _asm(text: str, limit: float, constraints: str, dtype: torch.dtype) -> Callable[..., Any]:
    asm = text.format(least=as_ptx(-limit), most=as_ptx(limit), to_integer=as_ptx(TO_INTEGER))
    return instructing(asm, constraints, dtype)


def _made(form: Callable[..., Any], x: Any, dtype: torch.dtype) -> Any:
    return private.inductor_lowering.make_pointwise(form, override_return_dtype=dtype)(x)


def _within(x: Any, limit: float) -> Any:
    if is_nvidia(x):
        return _made(_asm(WITHIN, limit, "=f,f", torch.float32), x, torch.float32)
    known = private.inductor_lowering.lowerings
    return known[aten.clamp_max.default](known[aten.clamp_min.default](x, -limit), limit)


def _codes_of(x: Any, dtype: torch.dtype) -> Any:
    lowering, fmt = private.inductor_lowering, FORMATS[dtype]
    if fmt.is_float:
        held = x if is_nvidia(x) and _saturates(x.get_device()) else _within(x, fmt.max)
        return lowering.to_dtype(held, dtype)
    if is_nvidia(x):
        return lowering.to_dtype(_made(_asm(ROUNDED, fmt.max, "=r,f", torch.int32), x, torch.int32), dtype)
    rounded = lowering.lowerings[aten.round.default](x)
    return lowering.to_dtype(_within(rounded, fmt.max), dtype)


def _magnitude_bits(x: Any) -> Any:
    ops = private.inductor_lowering.ops

    def bits(value: Any) -> Any:
        magnitude = ops.abs(ops.to_dtype(value, torch.float32))
        return ops.to_dtype_bitcast(magnitude, torch.int32, torch.float32)

    return _made(bits, x, torch.int32)


def _magnitudes(bits: Any, dtype: torch.dtype) -> Any:
    ops = private.inductor_lowering.ops

    def magnitude(value: Any) -> Any:
        return ops.to_dtype(ops.to_dtype_bitcast(value, torch.float32, torch.int32), dtype)

    return _made(magnitude, bits, dtype)


def _inv_scale(amax: Any, dtype: torch.dtype, scale_dtype: torch.dtype) -> Any:
    ops, fp32, bits = private.inductor_lowering.ops, torch.float32, torch.int32

    def form(value: Any) -> Any:
        value = ops.to_dtype(value, fp32)
        found = ops.mul(value, ops.constant(1.0 / FORMATS[dtype].max, fp32))
        found = ops.maximum(found, ops.constant(SMALLEST_INV_SCALE, fp32))
        if scale_dtype == torch.bfloat16:
            whole = ops.add(ops.to_dtype_bitcast(found, bits, fp32), ops.constant(BF16_HALF, bits))
            found = ops.to_dtype_bitcast(ops.bitwise_and(whole, ops.constant(BF16_MASK, bits)), fp32, bits)
        is_finite = ops.lt(value, ops.constant(float("inf"), fp32))
        return ops.where(is_finite, found, ops.constant(float("nan"), fp32))

    return _made(form, amax, fp32)


def _quantized(x: Any, inv_scale: Any, dtype: torch.dtype) -> Any:
    lowering = private.inductor_lowering
    scale = lowering.lowerings[OPERATORS["reciprocal"]](lowering.to_dtype(inv_scale, torch.float32))
    return _codes_of(lowering.mul(lowering.to_dtype(x, torch.float32), scale), dtype)


def _saturates(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= SATURATING


def register() -> None:
    """Tell Inductor; once more does no harm."""
    for operator, form in (
        (code_forms.WITHIN, _within),
        (code_forms.CODES_OF, _codes_of),
        (code_forms.MAGNITUDE_BITS, _magnitude_bits),
        (code_forms.MAGNITUDES, _magnitudes),
        (code_forms.INV_SCALE, _inv_scale),
        (code_forms.QUANTIZED, _quantized),
    ):
        private.inductor_lowering.register_lowering(operator, type_promotion_kind=None)(form)


register()
