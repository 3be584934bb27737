"""The rows of the table of formats that a model can be compiled with: for what is saved, and for operands of linears.

A row of saved activations stores and does nothing else; its linears compute as they are. Attention stays in 8 bits unless the
row says otherwise. A row of linears multiplies and stores nothing in codes. On a CPU codes of FP8 are decoded and multiplied
("emulated"), those of INT8 by rows are multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp8compile.numerics import E4M3, INT8, Blocks, Codec, Groupwise, Rowwise, Tensorwise
from fp8compile.numerics.blocks import MX_BLOCK
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.scaling import E8M0

PLAIN = "plain"
Options = Mapping[str, Any]
STORAGE: Options = {"linears": "off"}
LINEAR: Options = {"linears": "tensorwise", "saved": "off"}
EMULATED: Options = {**LINEAR, "linears.emulate": True}
FEW = ("6bit", "5bit", "4bit", "3bit", "2bit")

SAVED: Mapping[str, Options] = {
    "saved auto": STORAGE,
    **{f"saved {name}": {**STORAGE, "saved": name} for name in ("int8", "e4m3", *FEW)},
}
LINEARS: Mapping[str, Options] = {
    "linears tensorwise": EMULATED,
    "linears tensorwise, e4m3": {**EMULATED, "linears.formats": "e4m3"},
    "linears rowwise": {**EMULATED, "linears": "rowwise"},
    "linears blockwise, e4m3": {**EMULATED, "linears": "blockwise", "linears.formats": "e4m3"},
    "linears mxfp8, e4m3": {**EMULATED, "linears": "mxfp8", "linears.formats": "e4m3"},
    "linears int8": {**LINEAR, "linears": "int8"},
}
ROWS: Mapping[str, Options] = {**SAVED, **LINEARS}
SIDE = 1024
CODECS: Mapping[str, Codec | FewBits] = {  # of an operand of linears: the left one
    "saved auto": Groupwise(INT8),  # of what a Llama saves
    "saved int8": Groupwise(INT8),
    "saved e4m3": Groupwise(E4M3),
    **{f"saved {name}": FewBits(int(name[0])) for name in FEW},
    "linears tensorwise": Tensorwise(E4M3),
    "linears tensorwise, e4m3": Tensorwise(E4M3),
    "linears rowwise": Rowwise(E4M3),
    "linears blockwise, e4m3": Blocks(E4M3),
    "linears mxfp8, e4m3": Blocks(E4M3, 1, MX_BLOCK, E8M0),
    "linears int8": Rowwise(INT8),
}
PUBLISHED: Mapping[str, str] = {  # what the sources say that could be read (benchmarks/papers)
    **{f"saved {name}": "8.1 times less memory at most, by bits not found (GACT)" for name in FEW},
}


def bytes_per_element() -> dict[str, float]:
    """By row: bytes of one encoded element, its share of scales included, of a matrix ``[SIDE, SIDE]`` in BF16."""
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).bfloat16()
    return {name: sum(part.nbytes for part in codec.encode(x)) / x.numel() for name, codec in CODECS.items()}
