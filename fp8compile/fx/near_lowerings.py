"""What Inductor makes of our own elementwise operators: a short form on an NVIDIA GPU, torch's own functions elsewhere.

numerics/near_functions.py    one instruction each, or few
numerics/rounding.py: mixed, halves            in words of 32 bits, where torch has them in 64: products take six instructions
numerics/states/dither.py: hashed, truncated   a product that wraps; FP32's subnormals
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile.numerics.code_forms import FORMATS
from fp8compile.numerics.formats import Format
from fp8compile.numerics.near_functions import OPERATORS, UNSIGNED, bits_of
from fp8compile.numerics.rounding import HALVES, MIXED, MULTIPLIERS
from fp8compile.numerics.states.dither import HASHED, HIGH, LOW, MULTIPLIER, TRUNCATED
from fp8compile.numerics.states.interface import SMALLEST

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


def lower_unsigned(x: Any) -> Any:
    lowering = private.inductor_lowering
    return lowering.clone(x) if is_nvidia(x) else lowering.lowerings[aten.abs.default](x)


def is_nvidia(x: Any) -> bool:
    return x.get_device().type == "cuda" and not torch.version.hip


@dataclass(frozen=True)
class Words:
    """``rounding.mixed`` and ``halves`` on words of uint32, whose products wrap, or of int64."""

    dtype: torch.dtype

    @property
    def ops(self) -> Any:
        return private.inductor_lowering.ops

    def taken(self, value: Any) -> Any:
        return self.ops.to_dtype(value, self.dtype)

    def folded(self, word: Any, bits: int) -> Any:
        return self.ops.bitwise_xor(word, self.ops.bitwise_right_shift(word, self.ops.constant(bits, self.dtype)))

    def times(self, word: Any, number: int) -> Any:
        return self.cut(self.ops.mul(word, self.ops.constant(number, self.dtype)))

    def cut(self, word: Any) -> Any:
        mask = self.ops.constant(0xFFFFFFFF, torch.int64)
        return word if self.dtype == torch.uint32 else self.ops.bitwise_and(word, mask)

    def words(self, word: Any, between: Any) -> Any:
        word = self.folded(self.times(self.folded(word, 16), MULTIPLIERS[0]), 15)
        word = self.ops.bitwise_xor(word, between)
        for number in MULTIPLIERS[1:]:
            word = self.folded(self.times(word, number), 15)
        return word

    def mixed(self, word: Any, between: Any) -> Any:
        return self.ops.to_dtype(self.words(self.taken(word), self.taken(between)), torch.int64)

    def halves(self, word: Any, between: Any, place: Any) -> Any:
        ops, between = self.ops, self.taken(between)

        def has(bit: int) -> Any:
            return ops.ne(ops.bitwise_and(place, ops.constant(bit, torch.int64)), ops.constant(0, torch.int64))

        first = self.words(self.taken(word), between)
        second = self.folded(self.times(ops.bitwise_xor(first, between), MULTIPLIERS[0]), 15)
        chosen = ops.where(has(2), second, first)
        shifted = self.cut(ops.bitwise_left_shift(chosen, ops.constant(16, self.dtype)))
        return ops.to_dtype(ops.where(has(1), shifted, chosen), torch.int64)


def lower_words(name: str) -> Callable[..., Any]:
    """The lowering of ``mixed`` or ``halves``."""

    def lowered(*args: Any) -> Any:
        lowering = private.inductor_lowering
        form = Words(torch.uint32 if args[0].get_device().type == "cuda" else torch.int64)
        return lowering.make_pointwise(getattr(form, name))(*lowering.broadcast_tensors(*args))

    return lowered


def hashed_in(device: str) -> Callable[..., Any]:
    """``dither.hashed`` in 32 bits. Where products wrap, as on a GPU, it is one, of which the first 12 bits are needed."""
    ops = private.inductor_lowering.ops

    def number(value: int) -> Any:
        return ops.constant(value if value < 2**31 else value - 2**32, torch.int32)

    def wrapping(bits: Any) -> Any:
        product = ops.mul(bits, number(MULTIPLIER << 9 & 0xFFFFFFFF))
        return ops.bitwise_and(ops.bitwise_right_shift(product, number(9)), number(0x7FF800))

    def in_range(bits: Any) -> Any:
        low = ops.bitwise_and(bits, number(4095))
        high = ops.bitwise_and(ops.bitwise_right_shift(bits, number(12)), number(2047))
        carried = ops.bitwise_right_shift(ops.mul(low, number(HIGH)), number(12))
        product = ops.add(ops.add(ops.mul(low, number(LOW)), ops.mul(high, number(HIGH))), carried)
        return ops.bitwise_left_shift(ops.bitwise_and(product, number(4095)), number(11))

    return wrapping if device == "cuda" else in_range


def lower_hashed(bits: Any) -> Any:
    return private.inductor_lowering.make_pointwise(hashed_in(bits.get_device().type))(bits)


def truncating(fmt: Format) -> Callable[..., Any]:
    """``dither.truncated`` on an NVIDIA GPU: times a power of two that takes the format's subnormals to FP32's, a code's bits
    are FP32's first ones. The conversion saturates."""
    smallest_normal = fmt.smallest / (2 * fmt.half_ulp)
    bits = 24 - round(-math.log2(fmt.half_ulp))  # of an FP32's mantissa that a code lacks
    down, up = bits_of(SMALLEST / smallest_normal), bits_of(smallest_normal / SMALLEST)
    asm = f"""{{.reg .f32 x; .reg .b32 b; mul.rn.f32 x, $1, 0f{down:08X}; mov.b32 b, x; and.b32 b, b, {-(1 << bits)};
        mov.b32 x, b; mul.rn.f32 $0, x, 0f{up:08X};}}"""
    cut = instructing(" ".join(asm.split()), "=f,f", torch.float32)
    return lambda y: private.inductor_lowering.ops.to_dtype(cut(y), fmt.dtype, src_dtype=torch.float32)


def rounding_down(fmt: Format) -> Callable[..., Any]:
    """``dither.truncated`` in arithmetic that every device has."""
    ops = private.inductor_lowering.ops

    def number(value: float, dtype: torch.dtype = torch.float32) -> Any:
        return ops.constant(value, dtype)

    def written(y: Any) -> Any:
        bits = ops.to_dtype_bitcast(y, torch.int32, torch.float32)
        binade = ops.bitwise_and(bits, number(0x7F800000, torch.int32))
        spacing = ops.mul(ops.to_dtype_bitcast(binade, torch.float32, torch.int32), number(2 * fmt.half_ulp))
        spacing = ops.maximum(spacing, number(fmt.smallest))
        of_it = ops.to_dtype_bitcast(spacing, torch.int32, torch.float32)
        unit = ops.to_dtype_bitcast(ops.sub(number(0x7F000000, torch.int32), of_it), torch.float32, torch.int32)
        cut = ops.mul(ops.floor(ops.mul(y, unit)), spacing)
        return ops.to_dtype(ops.minimum(cut, number(fmt.max)), fmt.dtype, src_dtype=torch.float32)

    return written


def lower_truncated(y: Any, dtype: torch.dtype) -> Any:
    form = (truncating if is_nvidia(y) else rounding_down)(FORMATS[dtype])
    return private.inductor_lowering.make_pointwise(form, override_return_dtype=dtype)(y)


def register() -> None:
    """Tell Inductor; once more does no harm."""
    for name, form in FORMS.items():
        private.inductor_lowering.register_lowering(OPERATORS[name], type_promotion_kind=None)(lowering_of(*form))
    private.inductor_lowering.register_lowering(UNSIGNED, type_promotion_kind=None)(lower_unsigned)
    private.inductor_lowering.register_lowering(MIXED, type_promotion_kind=None)(lower_words("mixed"))
    private.inductor_lowering.register_lowering(HALVES, type_promotion_kind=None)(lower_words("halves"))
    private.inductor_lowering.register_lowering(HASHED, type_promotion_kind=None)(lower_hashed)
    private.inductor_lowering.register_lowering(TRUNCATED, type_promotion_kind=None)(lower_truncated)


register()
