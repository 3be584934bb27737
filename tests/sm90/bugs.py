"""Bugs to put into the generated kernels of a small Llama layer: each must show in the interpreted result.

A bug is a substitution in the source of the kernels whose name contains ``kernel``. Bounds only shrink and indices only
move within a tensor: the interpreter's loads and stores are real.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .lowering import Rewrite

NORM, ROTARY, SWIGLU_BACKWARD, NORM_BACKWARD = (
    "mean_mul_pow_rsqrt",
    "cat_mul_neg",
    "silu_backward",
    "div_expand_mul_pow",
)
ANY = "triton_"


@dataclass
class Bug:
    """``before`` is a regular expression, ``after`` what re.sub puts in its place; ``sites`` counts the places changed."""

    kernel: str
    before: str
    after: str | Callable[[re.Match[str]], str]
    nan: bool = False  # seen where the input has a NaN
    sites: int = field(default=0, compare=False)

    def rewrite(self) -> Rewrite:
        """For ``Lowered.rewrite``."""

        def rewritten(name: str, source: str) -> str:
            if self.kernel not in name:
                return source
            source, count = re.subn(self.before, self.after, source)
            self.sites += count
            return source

        return rewritten


BUGS: Mapping[str, Bug] = {
    "mask: the last row is left out": Bug(NORM, r"xindex < xnumel", "xindex < xnumel - 1"),
    "stride: rows overlap": Bug(NORM, r"64\*x0\b", "63*x0"),
    "index: another half of the head": Bug("slice_backward", r"\(-16\) \+ x4", "(-15) + x4"),
    "index: a decode takes another group's scale": Bug(SWIGLU_BACKWARD, r"xindex // 112", "xindex // 224"),
    "store: two neighbours exchanged": Bug(
        SWIGLU_BACKWARD, r"store\(out_ptr1 \+ \(x2\)", "store(out_ptr1 + (x2 ^ 1)"
    ),
    "scale: another constant": Bug(ANY, r"0\.007874015748031496", "0.0078"),
    "scale: rounded down, not to nearest": Bug(ANY, r" 32768,", " 0,"),
    "rounding: towards zero": Bug(ANY, r"add\.rn\.f32", "add.rz.f32"),
    "saturation: too early": Bug(ANY, "0fC2FE0000", "0fC27C0000"),
    "NaN: lost in a scale": Bug(ANY, r'float\("nan"\)', "0.0", nan=True),
    "operands: swapped in a difference": Bug(SWIGLU_BACKWARD, r"= (tmp\d+) - (tmp\d+)", r"= \2 - \1"),
    "sign: lost in the rotation": Bug(ROTARY, r"= -tmp", "= tmp"),
    "sign: of a sum across rows": Bug(NORM_BACKWARD, r"= (accum\d) \+ (tmp\d+)", r"= \1 - \2"),
    "constant: another epsilon": Bug(NORM, r"1e-06", "1e-02"),
    "constant: sign of a factor": Bug(NORM_BACKWARD, r"-0\.5", "0.5"),
}
