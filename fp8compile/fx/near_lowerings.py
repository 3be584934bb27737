"""What Inductor makes of our own elementwise operators: a short form on an NVIDIA GPU, torch's own functions elsewhere.

numerics/near_functions.py    one instruction each, or few
numerics/rounding.py: mixed   in words of 32 bits, where torch has it in 64: products of 64 bits take six instructions
numerics/states/dither.py: hashed   by products that wrap
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile.numerics.near_functions import OPERATORS
from fp8compile.numerics.rounding import MIXED, MULTIPLIERS
from fp8compile.numerics.states.dither import HASHED, HIGH, LOW

aten = torch.ops.aten
FORMS = {
    "log2": ("lg2.approx.ftz.f32 $0, $1;", aten.log2.default),
    "exp2": ("ex2.approx.ftz.f32 $0, $1;", aten.exp2.default),
    "sqrt": ("{.reg .f32 x; max.NaN.f32 x, $1, 0f00800000; sqrt.approx.ftz.f32 $0, x;}", aten.sqrt.default),
    "reciprocal": ("rcp.approx.ftz.f32 $0, $1;", aten.reciprocal.default),
    "quotient": ("div.approx.ftz.f32 $0, $1, $2;", aten.div.Tensor),
}


def instructing(asm: str, constraints: str, dtype: torch.dtype) -> Callable[..., Any]:
    """What of values is one piece of PTX, as an elementwise function of Inductor's."""

    def written(*values: Any) -> Any:
        ops = private.inductor_lowering.ops
        return ops.inline_asm_elementwise(*values, asm=asm, constraints=constraints, dtype=dtype)

    return written


def lowering_of(instruction: str, exact: Any) -> Callable[..., Any]:
    """The lowering of an FP32 operator: the PTX instruction, or what ``exact`` is lowered to."""
    written = instructing(instruction, "=f,f,f" if "$2" in instruction else "=f,f", torch.float32)

    def lowered(*args: Any) -> Any:
        if not is_nvidia(args[0]):
            return private.inductor_lowering.lowerings[exact](*args)
        return private.inductor_lowering.make_pointwise(written)(*private.inductor_lowering.broadcast_tensors(*args))

    return lowered


def is_nvidia(x: Any) -> bool:
    return x.get_device().type == "cuda" and not torch.version.hip


def mixed_in(dtype: torch.dtype) -> Callable[..., Any]:
    """``rounding.mixed`` on uint32, whose products wrap, or on int64."""
    ops = private.inductor_lowering.ops

    def folded(word: Any, bits: int) -> Any:
        return ops.bitwise_xor(word, ops.bitwise_right_shift(word, ops.constant(bits, dtype)))

    def times(word: Any, number: int) -> Any:
        product = ops.mul(word, ops.constant(number, dtype))
        return product if dtype == torch.uint32 else ops.bitwise_and(product, ops.constant(0xFFFFFFFF, dtype))

    def mixed(word: Any, between: Any) -> Any:
        word = folded(times(folded(ops.to_dtype(word, dtype), 16), MULTIPLIERS[0]), 15)
        word = ops.bitwise_xor(word, ops.to_dtype(between, dtype))
        for number in MULTIPLIERS[1:]:
            word = folded(times(word, number), 15)
        return ops.to_dtype(word, torch.int64)

    return mixed


def lower_mixed(word: Any, between: Any) -> Any:
    lowering = private.inductor_lowering
    form = mixed_in(torch.uint32 if word.get_device().type == "cuda" else torch.int64)
    return lowering.make_pointwise(form)(*lowering.broadcast_tensors(word, between))


def hashed_in(device: str) -> Callable[..., Any]:
    """``dither.hashed`` in 32 bits. Where products wrap, as on a GPU, the 12 bits that are needed are made the first ones."""
    ops = private.inductor_lowering.ops

    def number(value: int) -> Any:
        return ops.constant(value if value < 2**31 else value - 2**32, torch.int32)

    def upper(bits: Any) -> Any:
        return ops.bitwise_and(ops.bitwise_right_shift(bits, number(12)), number(2047))

    def wrapping(bits: Any) -> Any:
        low, high = (number(each << 20 & 0xFFFFFFFF) for each in (LOW, HIGH))
        mixed = ops.add(ops.mul(bits, low), ops.mul(upper(bits), high))
        return ops.bitwise_and(ops.bitwise_right_shift(mixed, number(9)), number(0x7FF800))

    def in_range(bits: Any) -> Any:
        low = ops.mul(ops.bitwise_and(bits, number(4095)), number(LOW))
        mixed = ops.add(low, ops.mul(upper(bits), number(HIGH)))
        return ops.bitwise_left_shift(ops.bitwise_and(mixed, number(4095)), number(11))

    return wrapping if device == "cuda" else in_range


def lower_hashed(bits: Any) -> Any:
    return private.inductor_lowering.make_pointwise(hashed_in(bits.get_device().type))(bits)


def register() -> None:
    """Tell Inductor; once more does no harm."""
    for name, form in FORMS.items():
        private.inductor_lowering.register_lowering(OPERATORS[name], type_promotion_kind=None)(lowering_of(*form))
    private.inductor_lowering.register_lowering(MIXED, type_promotion_kind=None)(lower_mixed)
    private.inductor_lowering.register_lowering(HASHED, type_promotion_kind=None)(lower_hashed)


register()
