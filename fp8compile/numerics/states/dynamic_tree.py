"""Dynamic tree quantisation in blocks (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization").

    code   sign | 0 ... 0 (E times) | 1 | i (f bits)             E + f + 1 = M, the bits of the magnitude
    value  10**-E * (0.1 + 0.9 * (i + 1) / 2**f)                 times the group's amax

E zeros are E decades, a 1 ends them, and the bits that remain divide a decade (0.1, 1] into 2**f equal steps. The value is
the *right* end of its step. So +-1 are codes (amax comes back exactly), the map is sign-symmetric, 0 is the all-zero
code, and a step down from a decade's lowest value is the highest of the next. bitsandbytes takes the middles of the
steps and makes one of them 1: its map has no -1 and is not symmetric. A state that is never negative uses the sign bit
as another fraction bit. Signed 8 bit: 1 ... 1e-6 and 0; unsigned: 1 ... 1e-7 and 0.

The magnitude's bits are 2**f + i, so within a decade they count steps down from its top, whose bits are 2**(f + 1) - 1:

    bits = top - round((1 - a * 10**E) / step)        a = |x| / amax in (10**-(E + 1), 10**-E],  step = 0.9 / 2**f

One step past the decade's lowest value is the next decade's top, by bits and by value, so rounding is to the nearest
code across decades too. The last decade has one value and reaches down to 0: there step = 1. A value above 0 of a state
that is never negative gets at least the lowest code, and is at least 2**-126 when decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.states.dither import dithered
from fp8compile.numerics.states.interface import Grouped, unit_and_amax, zeros_or


@dataclass(frozen=True)
class DynamicTree(Grouped):
    """Eight-bit tree codes and one FP32 amax per group. The error is half a step or less: see ``tree_map``."""

    @property
    def name(self) -> str:
        return "dynamic_tree"

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        return encode_tree(x_NG, self.signed, bits=8, dithers=self.dithers)

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        return decode_tree(codes_NG, metadata_N1[0], self.signed, bits=8)


def tree_map(signed: bool, bits: int = 8) -> Tensor:
    """Every value of the map in ascending order, FP64, straight from the definition."""
    length = bits - signed
    decades = ((E, length - 1 - E) for E in range(length))
    values = {10.0**-E * (0.1 + 0.9 * (i + 1) / 2**f) for E, f in decades for i in range(2**f)}
    mirrored = {-value for value in values} if signed else set()
    return torch.tensor(sorted({0.0} | values | mirrored), dtype=torch.float64)


def encode_tree(x_NG: Tensor, signed: bool, bits: int, dithers: bool = False) -> tuple[Tensor, Tensor]:
    """Codes ``[N, G]``, uint8 of which ``bits`` are used, and amax ``[N, 1]``."""
    unit, amax = unit_and_amax(x_NG)
    top, steps_down = steps_of(unit, bits - signed)
    magnitude = top - (dithered(steps_down, x_NG) if dithers else steps_down.round())
    if signed:
        codes = torch.where((x_NG < 0) & (magnitude > 0), magnitude + 2 ** (bits - 1), magnitude)
    else:
        codes = torch.where(x_NG > 0, magnitude.clamp_min(1), 0.0)
    return codes.to(torch.uint8), amax


def decode_tree(codes_NG: Tensor, amax_N1: Tensor, signed: bool, bits: int) -> Tensor:
    """The inverse of ``encode_tree``."""
    codes = codes_NG.float()
    if not signed:
        return zeros_or(codes, amax_N1, value_of(codes, bits) * amax_N1)
    sign_bit = 2.0 ** (bits - 1)
    negative = codes >= sign_bit
    a = value_of(torch.where(negative, codes - sign_bit, codes), bits - 1) * amax_N1
    return torch.where(negative, -a, a)


def decades_of(bits: int) -> list[tuple[float, float, float]]:
    """For E = 0, 1 ...: 10**E, the magnitude bits of the decade's top, and the step between its values times 10**E."""
    by_fraction_bits = [(10.0 ** (bits - 1 - f), 2.0 ** (f + 1) - 1, (0.9 if f else 1.0) / 2**f) for f in range(bits)]
    return by_fraction_bits[::-1]


def magnitude_of(a: Tensor, bits: int) -> Tensor:
    """The bits, as FP32 numbers, of the value nearest to ``a`` in [0, 1]; midway between two, those of either."""
    top, steps_down = steps_of(a, bits)
    return top - steps_down.round()


def steps_of(a: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """For ``a`` in [0, 1], the bits of its decade's top, and how many steps, whole or not, it lies below that."""
    power, top, steps = (torch.full_like(a, each) for each in (1.0, 2.0**bits - 1, 2 ** (bits - 1) / 0.9))
    for power_E, top_E, step_E in decades_of(bits)[1:]:
        here = a <= 1 / power_E
        power = torch.where(here, power_E, power)
        top = torch.where(here, top_E, top)
        steps = torch.where(here, 1 / step_E, steps)
    return top, (1 - a * power) * steps


def value_of(magnitude: Tensor, bits: int) -> Tensor:
    """The value in [0, 1] that magnitude bits (FP32 numbers) stand for."""
    *decades, (power, top, step) = decades_of(bits)
    tenth, top_of, step_of = (torch.full_like(magnitude, each) for each in (1 / power, top, step))
    for power_E, top_E, step_E in reversed(decades):
        here = magnitude >= (top_E + 1) / 2
        tenth = torch.where(here, 1 / power_E, tenth)
        top_of = torch.where(here, top_E, top_of)
        step_of = torch.where(here, step_E, step_of)
    return tenth * (1 - (top_of - magnitude) * step_of)
