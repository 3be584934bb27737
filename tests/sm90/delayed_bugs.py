"""Bugs to put into the generated kernels of a small Llama layer with delayed scales, cached weights and merged dgrads.

Each must show in the interpreted result, statistics included (run_delayed_bugs.py). EQUIVALENT are changes of the text that
change no result, each with the argument; they must not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .bugs import Bug

KNOWN, CLIPPED, NAN = "known scales", "scales that clip", "a NaN in the input"
TOTALS_ALONE = "statistics totalled alone"

NORM, ROTARY, MIXED, SWIGLU = "rsqrt_0", "cat_mul_neg", "per_fused_transpose_2", "per_fused__unsafe_view_mul_silu_4"
TOTALS, COLUMNS, PLACED = "poi_fused_5", "poi_fused_6", "poi_fused_15"  # TOTALS: forward; and codes of a gradient
LARGEST, GRADIENT_STATISTICS = "per_fused_0", "per_fused_2"
NORM_BY_COLUMNS, SWIGLU_STATISTICS, SWIGLU_BACKWARD = (
    "poi_fused_mul_3",
    "silu_backward_view_6",
    "silu_backward_view_7",
)
NORM_BACKWARD, TURNED, VALUES, HEADS_STATISTICS, HEADS = (
    "pow_sum_view_8",
    "poi_fused_9",
    "poi_fused_transpose_11",
    "slice_backward_transpose_12",
    "slice_backward_transpose_13",
)
ANY = "triton_"


@dataclass
class DelayedBug(Bug):
    """``situation`` is the one in which it shows, if anywhere."""

    situation: str = KNOWN


def _exchanged(kernel: str, one: int, other: int, index: str, situation: str = KNOWN) -> DelayedBug:
    """Two pointers exchanged where they are indexed so."""
    pointer = rf"ptr({one}|{other}) \+ \({index}\)"
    written = index.replace("\\", "")
    return DelayedBug(kernel, pointer, lambda m: f"ptr{one + other - int(m[1])} + ({written})", situation=situation)


BUGS: Mapping[str, DelayedBug] = {
    "scale: another operand's": DelayedBug(MIXED, r"in_ptr1 \+ \(4\)", "in_ptr1 + (8)"),
    "scale: another column of its row": DelayedBug(SWIGLU, r"in_ptr2 \+ \(12\)", "in_ptr2 + (13)"),
    "scale: not inverted": DelayedBug(NORM_BY_COLUMNS, r"= \((tmp\d+) / (tmp\d+)\)", r"= \2"),
    "scale: gate's and up's exchanged, in one layout": _exchanged(SWIGLU_BACKWARD, 4, 8, "0"),
    "balance: w / own upside down": _exchanged(SWIGLU_BACKWARD, 6, 9, "0"),
    "balance: the smallest product, not the largest": DelayedBug(LARGEST, r"max2", "min2"),
    "mask: the last row of codes is left out": DelayedBug(NORM_BY_COLUMNS, r"yindex < ynumel", "yindex < ynumel - 1"),
    "mask: half of a head is not taken": DelayedBug(
        ROTARY, r"(tmp18|tmp29) = tl\.where\(tmp9, (tmp\d+), tmp\d+\)", r"\1 = \2"
    ),
    "store: not transposed": DelayedBug(
        NORM_BY_COLUMNS, r"store\(out_ptr0 \+ \(y0 \+ 16\*x1\)", "store(out_ptr0 + (x1 + 64*y0)"
    ),
    "store: rows of the packed matrix overlap": DelayedBug(VALUES, r"x1 \+ 192\*y0", "x1 + 191*y0"),
    "store: q and k exchanged in the packed matrix": _exchanged(HEADS, 0, 3, r"x2 \+ 192\*y3"),
    "load: not transposed": DelayedBug(TURNED, r"in_ptr0 \+ \(y0 \+ 64\*x1\)", "in_ptr0 + (x1 + 16*y0)"),
    "index: one off in the rotation's backward": DelayedBug(HEADS, r"\(-16\) \+ x2", "(-15) + x2"),
    "format: E4M3 for a gradient": DelayedBug(HEADS, r"tl\.float8e5\b", "tl.float8e4nv"),
    "saturation: too early": DelayedBug(MIXED, r"-448\.0", "-416.0", situation=CLIPPED),
    "NaN: lost in a code": DelayedBug(ANY, r'float\("nan"\)', "0.0", situation=NAN),
    "NaN: not counted": DelayedBug(SWIGLU, r"= (tmp\d+) == 0", r"= \1 & False", situation=NAN),
    "amax: dropped": DelayedBug(GRADIENT_STATISTICS, r"tl\.store\(out_ptr2.*", ""),
    "amax: without the sign taken off": DelayedBug(
        GRADIENT_STATISTICS, r"tl_math\.abs\((tmp\d+)\)", r"\1", situation=CLIPPED
    ),
    "amax: of another value than is encoded": DelayedBug(SWIGLU_STATISTICS, r"= (tmp\d+) - (tmp\d+)", r"= \2 - \1"),
    "amax: the smallest row's": DelayedBug(TOTALS, r"triton_helpers\.maximum", "triton_helpers.minimum"),
    "amax: one partial maximum of 16 is lost": DelayedBug(
        ANY, r"tmp2 = triton_helpers\.maximum\(tmp0, tmp1\)", "tmp2 = tmp0", situation=TOTALS_ALONE
    ),
    "clips: one partial count of 16 is lost": DelayedBug(ANY, r"= tmp0 \+ tmp1\b", "= tmp0", situation=TOTALS_ALONE),
    "reduction: one column short": DelayedBug(
        SWIGLU_STATISTICS, r"r0_index < r0_numel", "r0_index < r0_numel - 1", situation=CLIPPED
    ),
    "reduction: partial maxima of another operand": DelayedBug(TOTALS, r"\b16\*x0", "8*x0"),
    "clips: counted from the format's largest on": DelayedBug(ANY, r"\b464\.0", "448.0", situation=CLIPPED),
    "statistics: clips where losses belong": DelayedBug(
        COLUMNS, r"in_ptr1 \+ \(8 \+ x1\)", "in_ptr1 + (4 + x1)", situation=CLIPPED
    ),
    "statistics: one row too early": DelayedBug(PLACED, r"\(-214\)", "(-213)"),
    "sum: a partial sum of the norm's weight is lost": DelayedBug(NORM_BACKWARD, r"= accum0 \+ ", "= 0 * accum0 + "),
}

# What changes no result, and why.
EQUIVALENT: Mapping[str, tuple[DelayedBug, str]] = {
    "saturation: removed before a cast to FP8": (
        DelayedBug(MIXED, r"= triton_helpers\.(?:maximum|minimum)\((tmp\d+), tmp\d+\)", r"= \1", situation=CLIPPED),
        "the cast saturates (cvt.rn.satfinite), and what is not finite is replaced by NaN in the line after",
    ),
    "mask: removed from sums and amaxes": (
        DelayedBug(
            SWIGLU_STATISTICS, r"= tl\.where\(r0_mask & xmask, (tmp\d+), [^)]*\)+", r"= \1", situation=CLIPPED
        ),
        "what is masked is loaded as 0; both results are 0 there, which no amax notices and no count counts",
    ),
}
