"""Five functions of which a GPU has a short form that is off in the last bits; here, and on a CPU, they are torch's own.

    log2(x)         lg2.approx.ftz.f32    within 2**-22 for x in (1/2, 2), elsewhere within 2**-22 of the result
    exp2(x)         ex2.approx.ftz.f32    within 2**-22 of the result
    sqrt(x)         sqrt.approx.ftz.f32   within 2**-23 of the result; x below 2**-126 counts as 2**-126
    reciprocal(x)   rcp.approx.ftz.f32    within 1 ulp for |x| in [2**-126, 2**126]
    quotient(a, b)  div.approx.ftz.f32    within 2 ulp for |b| in [2**-126, 2**126]; 0 for larger finite ones

The bounds are those of NVIDIA's PTX ISA (9.7.3, "Floating Point Instructions"). ``.ftz``: arguments and results below
2**-126 are zeros. Each is an operator, so that a traced graph holds it whole; fx/near_lowerings.py gives Inductor the form
of the device. A formula that uses them has to be right for torch's functions and for any within these bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fp8compile.numerics.operators import operator

ERROR = 2.0**-22  # of each: relative, which is 2 ulp; of log2 in (1/2, 2) absolute

EXACT: dict[str, Callable[..., Tensor]] = {
    "log2": torch.log2,
    "exp2": torch.exp2,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "quotient": torch.true_divide,
}
_SIGN = -(2**31)  # FP32's sign bit, as an int32
_TAKES = {"quotient": "Tensor a, Tensor b"}

OPERATORS = {
    name: operator(f"near_{name}({_TAKES.get(name, 'Tensor x')}) -> Tensor", exact) for name, exact in EXACT.items()
}

# What is never below zero, without a sign: on an NVIDIA GPU itself.
UNSIGNED = operator("near_unsigned(Tensor x) -> Tensor", torch.abs)


def log2(x: Tensor) -> Tensor:
    found: Tensor = OPERATORS["log2"](x)
    return found


def exp2(x: Tensor) -> Tensor:
    found: Tensor = OPERATORS["exp2"](x)
    return found


def sqrt(x: Tensor) -> Tensor:
    found: Tensor = OPERATORS["sqrt"](x)
    return found


def reciprocal(x: Tensor) -> Tensor:
    found: Tensor = OPERATORS["reciprocal"](x)
    return found


def quotient(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = OPERATORS["quotient"](a, b)
    return found


def at_least(a: Tensor, least: float) -> Tensor:
    """FP32, NaN without a sign kept: ``a.clamp_min(least)`` for least >= 0, as a maximum of integers, which a GPU has in one
    instruction: that of floating-point numbers that keeps a NaN is written as four by Inductor."""
    return a.view(torch.int32).clamp_min(bits_of(least)).view(torch.float32)


def at_most(a: Tensor, most: float) -> Tensor:
    """FP32 of either sign: ``a.clamp_max(most)`` for most > 0; NaN may become ``most``."""
    return a.view(torch.int32).clamp_max(bits_of(most)).view(torch.float32)


def unsigned(a: Tensor) -> Tensor:
    """FP32 that arithmetic made and that is never below zero, with no sign: its NaN has none on an NVIDIA GPU anyway."""
    found: Tensor = UNSIGNED(a)
    return found


def largest(a_NG: Tensor) -> Tensor:
    """Of FP32 magnitudes the largest ``[N, 1]``, NaN where there is one."""
    return a_NG.view(torch.int32).amax(-1, keepdim=True).view(torch.float32)


def signed_as(a: Tensor, x: Tensor) -> Tensor:
    """FP32 magnitudes with the signs of x: one operation on bits, where a comparison and a choice are two."""
    return (a.view(torch.int32) | (x.view(torch.int32) & _SIGN)).view(torch.float32)


def smallest_above_zero(a_NG: Tensor) -> Tensor:
    """Of FP32 magnitudes the smallest ``[N, 1]`` that is not zero; zero where all are."""
    ranks = (a_NG.view(torch.int32) - 1) ^ _SIGN  # in the order of magnitudes, but for zero, which is the last
    return ((ranks.amin(-1, keepdim=True) ^ _SIGN) + 1).view(torch.float32)


@functools.cache
def bits_of(number: float) -> int:
    """FP32's bits of 0, or of a positive normal number that FP32 holds."""
    if number == 0:
        return 0
    mantissa, exponent = math.frexp(number)  # in [1/2, 1)
    return (exponent + 126) * 2**23 + int((2 * mantissa - 1) * 2**23)
