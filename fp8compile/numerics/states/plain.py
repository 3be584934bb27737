"""States stored without tricks: FP32, BF16, and codes that are linear in the value, one inv_scale per group.

    inv_scale = amax / code_max      code = round(x / inv_scale)      x_hat = code * inv_scale

An unsigned state's integer codes are 0 ... 255. Where a state is unsigned a value above 0 gets at least the smallest
code: 1 / sqrt(v) must not see a zero where v is not zero (4-bit optimizers, Li et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fp8compile.numerics.formats import E4M3, INT8, Format
from fp8compile.numerics.scaling import inv_scale_of, quantize
from fp8compile.numerics.states.dither import dithered_to, dithered_to_bfloat16
from fp8compile.numerics.states.interface import Grouped

UINT8 = Format("uint8", torch.uint8, max=255.0, smallest=1.0, half_ulp=0.0)


@dataclass(frozen=True)
class Whole:
    """No codes: the state in a float dtype.

    Attributes:
        rounding: "nearest", or "dithered" for BF16 where the state is never negative (``states.dither``). A state that only
            shrinks keeps its number in either: BF16 has no FP32 scale that takes the factor up.
    """

    dtype: torch.dtype = torch.float32
    rounding: str = field(default="nearest", kw_only=True)

    parts: ClassVar[tuple[str, ...]] = ("value",)

    @property
    def name(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return ((dithered_to_bfloat16(x) if self.rounding == "dithered" else x).to(self.dtype),)

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return parts[0].float()


@dataclass(frozen=True)
class LinearCodes(Grouped):
    """E4M3, E5M2 or 8-bit integers (signed or not, as the state is) under one FP32 inv_scale per group."""

    format: Format = E4M3

    parts: ClassVar[tuple[str, ...]] = ("codes", "inv_scale")

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def code(self) -> Format:
        """The format of the codes: unsigned states use an integer's sign bit too."""
        return UINT8 if self.format == INT8 and not self.signed else self.format

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        fmt = self.code
        inv_scale = inv_scale_of(x_NG.abs().amax(-1, keepdim=True), fmt)
        if self.signed:
            return quantize(x_NG, inv_scale, fmt), inv_scale
        codes = torch.where(x_NG > 0, (x_NG * inv_scale.reciprocal()).clamp(fmt.smallest, fmt.max), 0.0)
        if self.dithers:
            return dithered_to(codes, fmt, x_NG), inv_scale
        return (codes if fmt.is_float else codes.round()).to(fmt.dtype), inv_scale

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        return codes_NG.float() * metadata_N1[0]
