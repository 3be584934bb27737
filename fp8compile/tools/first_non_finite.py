"""The first value of a step that is not finite, and its text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from rich.console import RenderableType

from fp8compile._text import printed, table
from fp8compile.fx.graph import shape_text
from fp8compile.observe.text import number
from fp8compile.tools.interpreter import TensorSummary

SCHEMA = "fp8compile.first_non_finite/2"  # 2: shapes are numbers

STRICTER = (
    "Every intermediate was rounded to its dtype; a generated kernel keeps FP32 between the operations it fuses, so this is "
    "the stricter of the two."
)


def line_of_first(first: FirstNonFinite) -> str:
    """``blocks.1.attn (forward) sum.dim_IntList at model.py:41 in forward: z = k.sum(1): inf in 12 of 4096 f16 values``."""
    value = first.value
    counts = f"{value.non_finite} of {value.numel} {value.dtype} values"
    at = f" at {first.source}" if first.source else ""
    if first.kind == "outside":
        what = (
            f"the gradient that reaches {first.module or 'the model'}"
            if first.direction == "backward"
            else value.name
        )
        return f"{what} ({first.direction}){at}: {counts}, made outside the compiled graphs"
    if first.kind != "operation":
        what = "the data" if first.kind == "data" else f"a {first.kind}"
        return f"{what}, not a layer: {value.name} {shape_text(value.shape)} came in with {counts}"
    return f"{first.module or 'the model'} ({first.direction}) {first.op}{at}: {counts}"


def text_of_first(first: FirstNonFinite) -> str:
    """The line, a table of the value and the inputs, and the remark."""
    rows = [*(_of_range("input", each) for each in first.inputs), _of_range("output", first.value)]
    columns = ("", "value", "dtype", "shape", "min", "max", "|x| max", "not finite")
    parts: list[RenderableType] = [first.line, table("ranges of what is finite", columns, rows)]
    parts += [text for text in (first.remark, STRICTER if first.kind == "operation" else "") if text]
    return printed(parts)


def _of_range(role: str, each: TensorSummary) -> tuple[str, ...]:
    numbers = tuple(map(number, (each.min, each.max, each.amax)))
    return role, each.name, each.dtype, shape_text(each.shape), *numbers, each.non_finite or "-"


@dataclass(frozen=True)
class FirstNonFinite:
    """The first value of a step that is not finite; ``str()`` gives it in a line, with a table of the inputs.

    Attributes:
        kind: "operation" (made by ``op``), "data", "parameter" or "buffer" (it came in with that), or "outside" (made by
            code that is not compiled: the loss, or what stands between two graphs).
        op: the aten operation; "input" or "loss" where no operation made the value.
        module: path of the module it was made in; for a parameter, an input or a buffer, its name.
        source: the user's source line.
        direction: "forward" or "backward".
        value: the value itself: dtype, shape, finite range, how many elements are inf, -inf and NaN.
        inputs: the same for all that the operation read.
        remark: what else one should know.
    """

    kind: str
    op: str
    module: str
    source: str
    direction: str
    value: TensorSummary
    inputs: tuple[TensorSummary, ...] = ()
    remark: str = ""

    @property
    def line(self) -> str:
        """Where, what and how much in one line."""
        return line_of_first(self)

    def to_json(self) -> str:
        """All attributes; NaN of an empty range is null."""
        text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)})
        return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1)

    def __str__(self) -> str:
        return text_of_first(self)
