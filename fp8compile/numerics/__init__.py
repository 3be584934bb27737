"""Pure maths on tensors. Imports torch only; written once, spliced into graphs, called by optimizers, proved by tests."""

from fp8compile.numerics.blocks import Blocks
from fp8compile.numerics.codecs import ENCODABLE, Codec, Groupwise, GroupwiseBest, Rowwise, Tensorwise
from fp8compile.numerics.formats import E4M3, E5M2, INT8, Format
from fp8compile.numerics.scaling import amax_rowwise, amax_tensorwise, dequantize, inv_scale_of, quantize

__all__ = [
    "E4M3",
    "E5M2",
    "ENCODABLE",
    "INT8",
    "Blocks",
    "Codec",
    "Format",
    "Groupwise",
    "GroupwiseBest",
    "Rowwise",
    "Tensorwise",
    "amax_rowwise",
    "amax_tensorwise",
    "dequantize",
    "inv_scale_of",
    "quantize",
]
