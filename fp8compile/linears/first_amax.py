"""The first half of a tensorwise amax on a GPU: which elements one number is taken of, for a kernel that is there anyway.

    d summed into a bias        [rows / R, R, C], down blocks of rows    with the first half of the bias' sum (row_blocks.py)
    an activation, a gradient   [numel / 128, 128]                       with codes of groups that are stored or decoded there
    anything else               [..., C], along rows                     with a norm's own sums

Behind an error function or a ``tanh`` a value is stored in 16 bit, unless memory is limited: computing it for the amax, the
codes and their transpose takes a GPU longer than writing and reading it.

A maximum may be taken in any parts. Along rows of 3,072 a kernel of GELU's backward computes 4,096 columns, and looks up
each element's group; in groups it computes none too many, and a group's scale is one number. Lowered for an H100 the sums
and amaxes of a ViT block's gradients take 8 instructions an element down blocks, and took 33 along rows.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from fp8compile.fx.graph import is_static
from fp8compile.fx.ops import computed_from, is_pointwise, is_reduction, opname
from fp8compile.linears.row_blocks import ALONG_ROWS, ROW_BLOCKS, in_blocks
from fp8compile.numerics.scaling import amax_over

GROUP = 128  # of saved values, by default
# What takes an NVIDIA GPU longer than to write 16 bits and read them again: 20 instructions and more in libdevice.
LOGARITHMS, WAVES = {"log", "log1p", "log2", "log10"}, {"sin", "cos", "tan"}
DEAR = LOGARITHMS | WAVES | {"erf", "erfc", "erfinv", "tanh", "atanh", "pow", "gelu", "mish"}


def first_parts(value: Node, width: int | None) -> tuple[int, ...] | None:
    """The shape in which the first half of a value's amax is taken, along its dimension 1; None: along rows, as it stands."""
    found = value.meta["val"]
    if found.device.type != "cuda" or not is_static(value) or not found.numel():
        return None
    if blocks := in_blocks(value, width, value.meta.get(ROW_BLOCKS, ALONG_ROWS)):
        return blocks
    if not is_pointwise(value) or not found.is_contiguous() or found.shape[-1] <= GROUP or found.shape[-1] % GROUP:
        return None
    return None if any(map(is_reduction, computed_from(value))) else (found.numel() // GROUP, GROUP)


def amax_in(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The largest magnitude of x, 0-d, in x's dtype, first in these parts along dimension 1."""
    return amax_over(x.reshape(parts), (1,)).amax()


def is_dear(value: Node) -> bool:
    """Whether a value on a GPU costs more to compute anew than to write and to read."""
    if value.meta["val"].device.type != "cuda" or not is_pointwise(value):
        return False
    return any(opname(each) in DEAR for each in (value, *computed_from(value)))
