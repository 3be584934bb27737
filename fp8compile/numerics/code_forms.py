"""Operators of codecs, of which a GPU has a short form; here, and on a CPU, they are torch's own functions.

    within(x, limit)         x.clamp(-limit, limit), NaN kept     two instructions, where comparisons that keep NaN take six
    codes_of(x, dtype)       saturating, to nearest even          E4M3, E5M2: the conversion saturates; INT8: below
    magnitude_bits(x)        |x| as FP32's bits, an int32         ordered as |x| is, NaN last; a maximum is one instruction
    magnitudes(bits, dtype)  what they stand for
    inv_scale(amax, dtype, scale)   numerics/scaling.py: exact_inv_scale   one node of a graph, where it is six or nine
    quantized(x, inv_scale, dtype)  numerics/scaling.py: quantize          one node, where it is six

The first four have the same results on a GPU, the last two but for 1 / inv_scale in its last bit (near_functions.py).
INT8: ``x + 1.5 * 2**23`` is x rounded to an integer, ties to even, since FP32's steps are 1 there; its last byte is the code.

Each is an operator, so that a graph holds it whole; ``fx/code_lowerings.py`` gives Inductor the form of the device, and
``passes/shorten_codecs.py`` puts them into graphs for a GPU. A NaN as INT8 is any code: its scale says that it is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.formats import E4M3, E5M2, INT8
from fp8compile.numerics.operators import operator
from fp8compile.numerics.scaling import exact_inv_scale, quantize

FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2, INT8)}


def _within(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


def _codes_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    fmt = FORMATS[dtype]
    rounded = x if fmt.is_float else x.round()
    return rounded.clamp(-fmt.max, fmt.max).to(dtype)


def _magnitude_bits(x: Tensor) -> Tensor:
    return x.abs().float().view(torch.int32)


def _magnitudes(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(torch.float32).to(dtype, copy=True)


def _inv_scale(amax: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> Tensor:
    return exact_inv_scale(amax, FORMATS[dtype], scale_dtype)


def _quantized(x: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return quantize(x, inv_scale, FORMATS[dtype])


def _like(dtype: torch.dtype | None = None) -> Any:
    """A result as the first argument, in ``dtype``, or in that of the last argument."""
    return lambda x, *others: torch.empty_like(x, dtype=dtype or others[-1])


WITHIN = operator("within(Tensor x, float limit) -> Tensor", _within, result=_like(torch.float32))
CODES_OF = operator("codes_of(Tensor x, ScalarType dtype) -> Tensor", _codes_of, result=_like())
MAGNITUDE_BITS = operator("magnitude_bits(Tensor x) -> Tensor", _magnitude_bits, result=_like(torch.int32))
MAGNITUDES = operator("magnitudes(Tensor bits, ScalarType dtype) -> Tensor", _magnitudes, result=_like())
INV_SCALE = operator(
    "inv_scale(Tensor amax, ScalarType dtype, ScalarType scale_dtype) -> Tensor",
    _inv_scale,
    result=_like(torch.float32),
)
QUANTIZED = operator("quantized(Tensor x, Tensor inv_scale, ScalarType dtype) -> Tensor", _quantized, result=_like())
