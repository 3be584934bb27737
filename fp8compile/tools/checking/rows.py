"""What a check found of one gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

OK, BELOW, ROUNDING, NOT_FINITE = "ok", "below the bar", "rounding", "not finite"
IN_CODE = "wrong in generated code"


@dataclass(frozen=True)
class Cause:
    """What makes a gradient wrong: the tensors stored as codes in a module (``kind`` "saved"), or its FP8 linear.

    Attributes:
        module, kind: where and what; "" is the model itself.
        db: the gradient's SQNR when this alone is encoded; NaN where it was not run alone.
        tensors: the tensors that are encoded there.
    """

    module: str
    kind: str
    db: float
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter, or of an argument; or an output.

    Attributes:
        name: its name.
        db: SQNR of the encoded step against the exact one.
        floor: SQNR of the exact step against itself, its parameters moved by one last place.
        verdict: "ok"; "below the bar"; "rounding": the exact gradient is itself not determined to the bar, so it was
            compared with the norm of the whole step; "not finite": the exact gradient holds NaN or inf; "wrong in
            generated code": it is well in the graph, run node by node.
        causes: for a gradient below the bar, its causes, largest first.
        repaired: SQNR with ``Check.recipe``; NaN where nothing was to be repaired.
        generated: SQNR of the code that is generated for ``Check.recipe``; NaN where none ran.
    """

    name: str
    db: float
    floor: float
    verdict: str
    causes: tuple[Cause, ...] = ()
    repaired: float = math.nan
    generated: float = math.nan
