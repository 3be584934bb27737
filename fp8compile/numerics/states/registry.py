"""The names of ``state_format`` and the codecs they stand for.

bits per element: 8 for the codes (2, 4, 16, 32 where the name says so), and per group of 128 an FP32 scale (0.25; BF16 in
int4_companded, 0.125) and, where ranges are expanded, one byte for k (0.0625).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fp8compile.numerics.formats import E4M3, E5M2, INT8
from fp8compile.numerics.states.channels_last import MARK, ChannelsLast
from fp8compile.numerics.states.companding import Companded, Companded4
from fp8compile.numerics.states.dither import ROUNDINGS
from fp8compile.numerics.states.dynamic_tree import DynamicTree
from fp8compile.numerics.states.four_bit import DynamicExponent4, Linear4, RankOne4
from fp8compile.numerics.states.interface import GROUP, StateCodec
from fp8compile.numerics.states.logarithmic import Log2, Log4
from fp8compile.numerics.states.plain import LinearCodes, Whole
from fp8compile.numerics.states.range_expansion import Expanded

SIGNED_ONLY, UNSIGNED_ONLY = ("dynamic4", "int4_companded"), ("linear4", "rank1_linear4", "log4", "log2")
STATE_FORMATS = (
    "e4m3_expanded",
    "e5m2_expanded",
    "dynamic_tree",
    "int8_companded",
    "e4m3",
    "e5m2",
    "int8",
    "dynamic4",
    "linear4",
    "rank1_linear4",
    "int4_companded",
    "log4",
    "log2",
    "bf16",
    "fp32",
)

ALIASES: Mapping[str, tuple[str, str]] = {
    "4bit": ("dynamic4", "linear4"),
    "4bit_log": ("int4_companded", "log4"),
}  # of states that may be negative, of others


def state_codec(
    name: str, *, signed: bool, group_size: int | None = GROUP, rounding: str | None = None
) -> StateCodec:
    """The codec called ``name`` for a state that may be negative (``signed``) or never is.

    Args:
        rounding: "nearest" or, only for states that are never negative, "dithered" (``states.dither``). For these, None
            means "dithered": second moments grow by less than a code step. FP32 is not rounded.

    Raises:
        ValueError: there is no such format or rounding, or it is for states of the other kind.
    """
    rounding = rounding or ("nearest" if signed else "dithered")
    if rounding not in ROUNDINGS[: 1 if signed else 2]:
        raise ValueError(
            f"no rounding {rounding!r} for such a state; there are 'nearest' and, not signed, 'dithered'"
        )
    if name not in STATE_FORMATS:
        raise ValueError(f"no state format {name!r}; there are {', '.join(STATE_FORMATS)}")
    if name in (UNSIGNED_ONLY if signed else SIGNED_ONLY):
        kind = "a state that may be negative, such as exp_avg" if signed else "a state that is never negative"
        fitting = ", ".join(each for each in STATE_FORMATS if each not in (UNSIGNED_ONLY if signed else SIGNED_ONLY))
        raise ValueError(f"state format {name!r} does not fit {kind}: one of {fitting} does")
    if name == "fp32":
        return Whole()
    grouped: dict[str, StateCodec] = {
        "bf16": Whole(torch.bfloat16, rounding=rounding),
        "e4m3": LinearCodes(signed, group_size, E4M3, rounding=rounding),
        "e5m2": LinearCodes(signed, group_size, E5M2, rounding=rounding),
        "int8": LinearCodes(signed, group_size, INT8, rounding=rounding),
        "e4m3_expanded": Expanded(signed, group_size, E4M3, rounding=rounding),
        "e5m2_expanded": Expanded(signed, group_size, E5M2, rounding=rounding),
        "dynamic_tree": DynamicTree(signed, group_size, rounding=rounding),
        "int8_companded": Companded(signed, group_size, rounding=rounding),
        "dynamic4": DynamicExponent4(group_size),
        "linear4": Linear4(group_size, rounding=rounding),
        "rank1_linear4": RankOne4(rounding),
        "int4_companded": Companded4(group_size),
        "log4": Log4(group_size, rounding=rounding),
        "log2": Log2(group_size, rounding=rounding),
    }
    return grouped[name]


def stored_codec(name: str, *, signed: bool) -> StateCodec:
    """The codec that a stored state's key names: a format, marked where the state is of a channels_last parameter.

    Raises:
        ValueError: as ``state_codec`` does.
    """
    codec = state_codec(name.removesuffix(MARK), signed=signed)
    return ChannelsLast(codec) if name.endswith(MARK) else codec


def state_bytes(name: str, shape: Sequence[int], *, signed: bool) -> int:
    """Bytes that ``state_codec(name, signed=signed)`` stores a state of ``shape`` in, metadata included.

    Raises:
        ValueError: as ``state_codec`` does.
    """
    stored = state_codec(name, signed=signed).encode(torch.empty(tuple(shape), dtype=torch.float32, device="meta"))
    return sum(math.prod(part.shape) * part.element_size() for part in stored)
