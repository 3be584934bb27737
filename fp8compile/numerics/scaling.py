"""Scales: how a tensor's range is moved into a one-byte format and back (COAT, section 3).

    inv_scale = amax / max          stored; it *leaves* FP8 and is what torch._scaled_mm takes
    scale     = 1 / inv_scale       it *enters* FP8; computed from the inv_scale as it was rounded for storage
    code      = saturate(x * scale)
    x_hat     = saturate(code * inv_scale)

Three rules hold everywhere:
  * inv_scale is rounded to its storage dtype first and the codes are made with the rounded one, so no systematic
    error is left between encoder and decoder (COAT divides by the FP32 scale and stores BF16: up to 2**-8 off).
  * inv_scale is at least 2**-126, the smallest normal of FP32 and BF16, so its reciprocal is finite; an all-zero
    tensor gets codes 0 and comes back as exact zeros.
  * A non-finite amax gives inv_scale = NaN, and NaN times any code is NaN: an inf or NaN never vanishes in a code,
    not even in INT8, whose codes cannot carry one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.numerics.formats import Format

SMALLEST_INV_SCALE = 2.0**-126
E8M0 = torch.float8_e8m0fnu  # a power of two, stored as its biased exponent in one uint8; 255 is NaN
SCALE_DTYPES = (torch.float32, torch.bfloat16, E8M0)

_NAN_E8M0 = 255
_E8M0_ZERO = 1 << 22  # the FP32 bits of 2**-127, a subnormal: what E8M0's code 0 stands for
_MANTISSA_MASK = 0x7FFFFF
BF16_HALF, BF16_MASK = 0x8000, -0x10000  # of the low half of an FP32, which BF16 drops


def amax_over(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest magnitude over ``dims``, which stay with size 1, in x's dtype. NaN where x has a NaN."""
    return x.abs().amax(dims, keepdim=True)


def amax_rowwise(x: Tensor) -> Tensor:
    """Largest magnitude of each row: ``x[..., n] -> [..., 1]``, in x's dtype. NaN if the row holds one."""
    if may_be_empty(x.shape[-1]):
        return torch.nn.functional.pad(x.abs(), (0, 1)).amax(-1, keepdim=True)
    return amax_over(x, (-1,))


def amax_tensorwise(x: Tensor) -> Tensor:
    """Largest magnitude of the whole tensor, 0-d, in x's dtype, as two reductions of which the second is small.

    The first runs in the kernel that produces x, the second over one number per row (COAT's *group scaling*); one
    full-size reduction would read x again.
    """
    if may_be_empty(x.numel()):
        return torch.nn.functional.pad(x.abs().reshape(-1), (0, 1)).amax()
    return x.abs().amax() if x.dim() < 2 else x.abs().amax(-1).amax()


def may_be_empty(count: int | torch.SymInt) -> bool:
    """Whether only a run knows if there are elements; amax is then taken of |x| and one zero, and is 0 without elements."""
    return not isinstance(count, int) and not statically_known_true(count > 0)


def inv_scale_of(amax: Tensor, fmt: Format, scale_dtype: torch.dtype = torch.float32) -> Tensor:
    """The stored inverse scale ``amax / fmt.max``, rounded to ``scale_dtype`` (for E8M0: up to a power of two).

    Args:
        amax: non-negative, any float dtype and shape.
        fmt: the format the codes will have.
        scale_dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float8_e8m0fnu``.

    Returns:
        Same shape as ``amax``; float32, bfloat16, or uint8 biased exponents for E8M0. NaN where amax is not finite.
    """
    return in_storage(exact_inv_scale(amax, fmt, scale_dtype), scale_dtype)


def exact_inv_scale(amax: Tensor, fmt: Format, scale_dtype: torch.dtype) -> Tensor:
    """The FP32 number that ``inv_scale_of`` stores, which ``scale_dtype`` has; codes made with it need no cast back."""
    amax = amax.float()
    inv_scale = (amax * (1.0 / fmt.max)).clamp_min(SMALLEST_INV_SCALE)
    if scale_dtype == E8M0:
        bits = inv_scale.view(torch.int32)
        exponent = ((bits >> 23) + ((bits & _MANTISSA_MASK) > 0)).clamp(1, 254)  # round up: amax enters at <= max
        inv_scale = (exponent << 23).view(torch.float32)
    if scale_dtype == torch.bfloat16:
        inv_scale = rounded_to_bf16(inv_scale)
    return torch.where(amax < torch.inf, inv_scale, torch.nan)  # not where amax is NaN


def in_storage(inv_scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """An FP32 number of ``exact_inv_scale`` in ``scale_dtype``, which has it; E8M0 as uint8 biased exponents."""
    if scale_dtype == E8M0:
        return torch.where(inv_scale.isnan(), _NAN_E8M0, inv_scale.view(torch.int32) >> 23).to(torch.uint8)
    return inv_scale.to(scale_dtype)


def rounded_to_bf16(x: Tensor) -> Tensor:
    """The FP32 tensor x (finite) rounded to nearest at BF16's precision, ties away from 0, by integer arithmetic.

    A plain ``.to(torch.bfloat16)`` is not enough: Inductor computes in FP32 and drops a cast that is undone in the
    same kernel, so codes would be made with the unrounded scale and decoded with the rounded one. Ties go away from 0 because
    that takes two operations, and ties to even take five; one scale in 2**16 is a tie, and both neighbours are equally near.
    """
    return ((x.view(torch.int32) + BF16_HALF) & BF16_MASK).view(torch.float32)


def inv_scale_value(inv_scale: Tensor) -> Tensor:
    """The FP32 number a stored inverse scale stands for (uint8 is read as E8M0)."""
    if inv_scale.dtype != torch.uint8:
        return inv_scale.float()
    power = (inv_scale.to(torch.int32) << 23).clamp_min(_E8M0_ZERO).view(torch.float32)
    return torch.where(inv_scale == _NAN_E8M0, torch.nan, power)


def quantize(x: Tensor, inv_scale: Tensor, fmt: Format) -> Tensor:
    """Codes of x under a stored inverse scale that broadcasts against it: round to nearest even, saturating.

    Error: ``|dequantize(code) - x| <= max(|x| * fmt.half_ulp, inv_scale * fmt.smallest / 2)`` for
    ``|x| <= fmt.max * inv_scale``, plus the rounding of the FP32 reciprocal and product (2**-22 relative; GPUs may
    approximate the reciprocal by 2 ulp more, so that a tie can fall the other way than on a CPU) and of the output dtype.
    """
    scaled = x.float() * inv_scale_value(inv_scale).reciprocal()
    if not fmt.is_float:
        scaled = scaled.round()
    return scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * inv_scale`` in ``dtype``, saturating at its largest finite value; NaN where inv_scale is NaN.

    A scale rounded up would otherwise carry the largest values past the end of ``dtype`` (65504 in FP16).
    """
    limit = torch.finfo(dtype).max
    return (codes.float() * inv_scale_value(inv_scale)).clamp(-limit, limit).to(dtype)
