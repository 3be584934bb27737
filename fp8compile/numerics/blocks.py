"""Blocks of a matrix, each under a scale of its own: operands of matmuls. Lines run along the contracted dimension.

    blockwise  1 x 128 of activations and gradients, 128 x 128 of weights; FP32 scales   DeepSeek-V3, 2412.19437, section 3.3
    MXFP8      1 x 32 of every operand; scales are powers of two (E8M0)                 OCP Microscaling 1.0; 2506.08027
    INT8       32 x 32 of every operand; FP32 scales                                    Jetfire, 2403.12422

    inv_scale [ceil(R/r), ceil(C/c)] = amax of the block / max       the rest is as in scaling.py

A square block serves both matmuls of its operand: transposed codes are the codes of the transpose. All other blocks are
lines, so a value that is contracted along rows in one matmul and along columns in another has two encodings.

**The last block of a line may be short.** Its scale sees its own elements alone. Zeros that fill it up would change no amax
and add nothing to a product, so these are the codes of a matrix that is padded for the hardware.

**MXFP8's exponent is rounded up**, to ceil(log2(amax / max)), as in NVIDIA's recipe (2506.08027). OCP's own rule,
floor(log2(amax)) - 8 for E4M3, sends an amax of 448 to 512 times the scale past the end, where it saturates: up to 1/8 of
the block's largest value is lost. Rounded up, nothing saturates, and a block has up to one binade less at its lower end.

Error of an element of a block without inf and NaN, decoded to FP32 (``quantize`` derives it; half_ulp is 1/16 for E4M3):

    |x_hat - x| <= max(|x| * half_ulp, inv_scale * smallest / 2)     inv_scale  = amax / max      blockwise
                                                                     inv_scale  < 2 * amax / max  MXFP8

and the rounding of a reciprocal and two products in FP32, 2**-24 each. Below an amax of 2**-126 * max scales stay at 2**-126.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.formats import E4M3, Format
from fp8compile.numerics.scaling import E8M0, amax_over, dequantize, inv_scale_of, quantize

BLOCK = 128  # DeepSeek-V3's, and the one that torch's scaled_mm names
MX_BLOCK = 32  # OCP Microscaling's
JETFIRE_BLOCK = 32  # of rows and of columns, in INT8


@dataclass(frozen=True)
class Blocks:
    """One scale per ``rows`` x ``columns`` of a matrix ``[R, C]``; those at its ends may be smaller.

    ``encode`` and ``decode`` are those of a ``Codec``, of matrices that are not empty.
    """

    format: Format = E4M3
    rows: int = 1
    columns: int = BLOCK
    scale_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        scales = ", E8M0" if self.scale_dtype == E8M0 else ""
        return f"{self.format.name} blocks of {self.rows}x{self.columns}{scales}"

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inv_scale = inv_scale_of(self._amax(x), self.format, self.scale_dtype)
        return quantize(x, self._of_each(inv_scale, x), self.format), inv_scale

    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(codes, self._of_each(inv_scale, codes), dtype)

    def _amax(self, x: Tensor) -> Tensor:
        """Of each block; zeros fill the short ones up."""
        R, C = x.shape
        if R % self.rows or C % self.columns:
            x = torch.nn.functional.pad(x, (0, -C % self.columns, 0, -R % self.rows))
        in_blocks = x.reshape(x.shape[0] // self.rows, self.rows, x.shape[1] // self.columns, self.columns)
        return amax_over(in_blocks, (1, 3)).squeeze((1, 3))

    def _of_each(self, inv_scale: Tensor, x: Tensor) -> Tensor:
        """The scale of each element of ``x``."""
        return _spread(_spread(inv_scale, 0, self.rows, x.shape[0]), 1, self.columns, x.shape[1])


def _spread(inv_scale: Tensor, dim: int, block: int, size: int) -> Tensor:
    """``inv_scale`` with each entry repeated along ``dim`` for its block, the last one for what is left of ``size``.

    The short block is put behind the full ones, and no index is divided by ``block`` where that does not divide ``size``:
    Inductor's C++ backend splits such a loop and drops its tail (torch 2.13, see Groups.beside).
    """
    if block == 1:
        return inv_scale
    full, tail = divmod(size, block)
    repeated = inv_scale.narrow(dim, 0, full).unsqueeze(dim + 1)
    sizes = [*repeated.shape]
    sizes[dim + 1] = block
    each = repeated.expand(sizes).flatten(dim, dim + 1)
    if not tail:
        return each
    last = inv_scale.narrow(dim, full, 1)
    return torch.cat([each, last.expand(*last.shape[:dim], tail, *last.shape[dim + 1 :])], dim)
