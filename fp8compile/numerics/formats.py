"""The one-byte number formats: E4M3 and E5M2 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning") and INT8.

E4M3   4 exponent bits, 3 mantissa bits, bias 7,  no infinity   max   448 = 1.75 * 2**8   smallest 2**-9
E5M2   5 exponent bits, 2 mantissa bits, bias 15, has infinity  max 57344 = 1.75 * 2**15  smallest 2**-16
INT8   two's complement, used symmetrically: -127 ... 127       max   127                 smallest 1

FP16's limits are here too: gradients are clipped to them, and islands and calibrations are measured against them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A one-byte number format.

    Attributes:
        name: the name recipes and reports use.
        dtype: the torch dtype that stores a code.
        max: the largest finite code value.
        smallest: the smallest positive code value (a subnormal in the floating formats).
        half_ulp: bound on the error of rounding a normal value to the nearest code, relative to that value;
            0.0 for INT8, whose grid is uniform: its error is ``smallest / 2`` everywhere.
    """

    name: str
    dtype: torch.dtype
    max: float
    smallest: float
    half_ulp: float

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point


E4M3 = Format("e4m3", torch.float8_e4m3fn, max=448.0, smallest=2.0**-9, half_ulp=2.0**-4)
E5M2 = Format("e5m2", torch.float8_e5m2, max=57344.0, smallest=2.0**-16, half_ulp=2.0**-3)
INT8 = Format("int8", torch.int8, max=127.0, smallest=1.0, half_ulp=0.0)

FP8 = (E4M3.dtype, E5M2.dtype)
OPERANDS = (*FP8, INT8.dtype)  # what matmuls of codes take
FP8_MULTIPLE = 16  # both sides of an FP8 matmul's operands are multiples, for torch._scaled_mm

FP16_MAX = 65504.0  # FP16's largest finite value
FP16_NORMAL = 2.0**-14  # FP16's smallest normal value: below, it loses bits
