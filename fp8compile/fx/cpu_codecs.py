"""Codecs of groups on a CPU as operators of their own, in C++ that is compiled once a machine (``cpu_codecs.cpp``).

    groups_encoded(x, format, scale, amax, rows, row, size) -> codes, inv_scale, amax    in x's shape, [groups, 1], [groups]
    groups_decoded(codes, inv_scale, dtype, rows, row, size) -> x                        in the codes' shape

A tensor is ``rows`` rows of ``row`` elements; groups have ``size`` elements and end with their row (numerics/groups.py). The
amaxes have x's dtype, and are none where ``amax`` is False. Results are those of numerics/codecs.py bit for bit. Inductor
would write each call's arithmetic anew, into each kernel that makes or reads a value, and the C++ compiler would read it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics.formats import E4M3, E5M2, INT8
from fp8compile.numerics.operators import operator

SOURCE = Path(__file__).with_suffix(".cpp")
FORMATS = {INT8.dtype: "Int8", E4M3.dtype: "E4M3", E5M2.dtype: "E5M2"}  # what the source calls them
VALUES = (torch.float32, torch.bfloat16)  # dtypes of values, and of scales
# Behind Inductor's own, which switch vectors of loops off. Those of scalars gcc 12 gets wrong (compiler/cpu_vectors.py).
FLAGS = ("-ftree-loop-vectorize", "-fno-math-errno", "-fno-tree-slp-vectorize")
# The flags of vectors would depend on the graph that is compiled; with those of the machine alone it is compiled once.
SAME_EVERYWHERE = {"cpp.simdlen": 1}
FEWEST = 2**15  # elements that more than one thread shares, as in ATen


@functools.cache
def compiled(fmt: torch.dtype) -> Any:
    """The function of ``cpu_codecs.cpp`` for a format; what is raised where no C++ compiler is found is Inductor's own."""
    source = f"#define FORMAT {FORMATS[fmt]}\n{SOURCE.read_text()}"
    with private.inductor_config.patch(SAME_EVERYWHERE):
        function = private.CppCodeCache.load(source, extra_flags=FLAGS).codec_of_groups
    pointers, sizes = [ctypes.c_void_p] * 4, [ctypes.c_int64] * 3
    function.argtypes = [*[ctypes.c_bool] * 3, *pointers, *sizes, ctypes.c_int]
    function.restype = None
    return function


def _run(encodes: bool, x: Tensor, codes: Tensor, inv_scale: Tensor, amax: Tensor | None, *groups: int) -> None:
    are_bf16 = (each.dtype == torch.bfloat16 for each in (inv_scale, x))
    threads = torch.get_num_threads() if x.numel() >= FEWEST else 1
    amaxes = None if amax is None or not amax.numel() else amax.data_ptr()
    compiled(codes.dtype)(
        encodes, *are_bf16, x.data_ptr(), codes.data_ptr(), inv_scale.data_ptr(), amaxes, *groups, threads
    )


def _encoded(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    codes, inv_scale, amax = _like_codes(x, *options)
    _run(True, x, codes, inv_scale, amax, *options[3:])
    return codes, inv_scale, amax


def _decoded(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype, *groups: int) -> Tensor:
    codes, inv_scale = codes.contiguous(), inv_scale.contiguous()
    x = _like_value(codes, inv_scale, dtype)
    _run(False, x, codes, inv_scale, None, *groups)
    return x


def _like_codes(
    x: Tensor, fmt: torch.dtype, scale: torch.dtype, amax: bool, rows: int, row: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    groups = rows * -(-row // size)
    codes, inv_scale = x.new_empty(x.shape, dtype=fmt), x.new_empty((groups, 1), dtype=scale)
    return codes, inv_scale, x.new_empty(groups if amax else 0)


def _like_value(codes: Tensor, inv_scale: Tensor, dtype: torch.dtype, *groups: int) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


GROUPS = "int rows, int row, int size"
ENCODED = operator(
    f"groups_encoded(Tensor x, ScalarType format, ScalarType scale, bool amax, {GROUPS}) -> (Tensor, Tensor, Tensor)",
    _encoded,
    pointwise=False,
    result=_like_codes,
)
DECODED = operator(
    f"groups_decoded(Tensor codes, Tensor inv_scale, ScalarType dtype, {GROUPS}) -> Tensor",
    _decoded,
    pointwise=False,
    result=_like_value,
)
