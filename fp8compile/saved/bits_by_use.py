"""How many bits a saved value takes where a recipe names few: ``saved.format="4bit"``, or "2bit" to "6bit".

    8 bits, by the rule of "auto"    what that rule gives E4M3 (compared with zero, made by exp, steep): small elements count
                                     what is biased, by ``fp8compile/analysis/sensitivity/average.py``
                                     rows of a length that only a run knows: codes do not tell their shape
    4 bits at least                  smooth functions of it, gently: the mean is off in the second order of the error
    as the recipe says               all gradients linear in it: unbiased, however few

Fused attention's operands and result have a field of their own, ``saved.attention_format``, 8 bits if a recipe says nothing.
Its values and its result are linear, but where tokens are alike the gradients of queries and keys are differences of what
they make, and noise that is a share of the values is not small beside these (numerics/centring.py). Its queries and keys are
exponentiated: with an error of 0.1 standard deviations (four bits) logits of standard deviation s are off by 0.14 s, and so
are probabilities, relatively. That is for a user to judge, with what gradients say; no fewer than four bits are taken.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.analysis.sensitivity.average import Answer
from fp8compile.fx.graph import memory_order
from fp8compile.fx.ops import is_attention, is_view
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.formats import Format
from fp8compile.numerics.groups import Groups

SMOOTH_BITS = 4
FOUR_BITS = Format("4bit", torch.uint8, max=7.5, smallest=1.0, half_ulp=0.0)  # half a step is amax / 15 or less
UNKNOWN_LENGTH = "8 bits: its rows have a length that only a run knows"


def few_bits_of(
    used: Node, bits: int, groups: Groups, sensitivity: Sensitivity, of_attention: bool
) -> tuple[FewBits | None, str]:
    """The codec for a value that INT8 may hold, and why it has more bits than asked for; None: it is to have 8.

    Args:
        used: its placeholder in the backward.
        bits: what the recipe asks for.
        groups: of its elements in memory.
        sensitivity: of its graphs.
        of_attention: whether the recipe names these bits for attention.
    """
    value = used.meta["val"]
    order = memory_order(value) or range(value.dim())
    if not isinstance(groups.row([value.shape[d] for d in order]), int):
        return None, UNKNOWN_LENGTH
    answer, why = sensitivity.answer_on_average(used)
    if answer is Answer.LINEAR:
        return FewBits(bits, groups.most, row_dims=groups.row_dims), ""
    if answer is Answer.OTHER and not (of_attention and _is_read_by_attention_alone(used)):
        return None, f"8 bits: {why}"
    if not sensitivity.is_gentle(used, FOUR_BITS):
        return None, f"8 bits: {why}, too steep for {SMOOTH_BITS}"
    few = FewBits(max(bits, SMOOTH_BITS), groups.most, row_dims=groups.row_dims)
    return few, why if bits < SMOOTH_BITS else ""


def _is_read_by_attention_alone(value: Node) -> bool:
    return all(is_attention(u) or (is_view(u) and _is_read_by_attention_alone(u)) for u in value.users)
