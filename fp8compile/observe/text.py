"""Overflow reports and first non-finite values as text: one line that says it, then a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from fp8compile.reporting.text import _table

if TYPE_CHECKING:
    from fp8compile.observe.history import Layer, Seen
    from fp8compile.observe.overflow_report import OverflowReport
    from fp8compile.tools.debug_step import FirstNonFinite
    from fp8compile.tools.interpreter import Range

SHOWN = 24  # lines of a report's table
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
        return f"{what}, not a layer: {value.name} {value.shape} came in with {counts}"
    return f"{first.module or 'the model'} ({first.direction}) {first.op}{at}: {counts}"


def text_of_first(first: FirstNonFinite) -> str:
    """The line, a table of the value and the inputs, and what to mind."""
    rows = [*(_of_range("input", each) for each in first.inputs), _of_range("output", first.value)]
    columns = ("", "value", "dtype", "shape", "min", "max", "|x| max", "not finite")
    parts: list[RenderableType] = [first.line, _table("ranges of what is finite", columns, rows)]
    parts += [text for text in (first.remark, STRICTER if first.kind == "operation" else "") if text]
    return _printed(parts)


def headline(report: OverflowReport) -> str:
    """The first overflow of all, or how near the nearest is."""
    if report.first is not None:
        return line_of(report.first)
    nearest = min(report.layers, key=lambda layer: layer.headroom, default=None)
    near = (
        "" if nearest is None else f"; {nearest.name} is nearest, 2^{nearest.headroom:.1f} below the largest number"
    )
    return f"no inf and no NaN in {len(report.steps)} step(s) of {len(report.layers)} values{near}"


def line_of(layer: Layer) -> str:
    """``step 17: blocks.3.attn (forward) mm.default at model.py:41 in forward: q @ k: inf in 12 of 4096 f16 values, ...``."""
    seen, before = layer.at_first, layer.amax_before
    counts = "inf or NaN, in a step no longer kept"
    if seen is not None:
        counts = f"{_counts(layer, seen)}, amax before {'-' if before is None else number(before)}"
    at = f" at {layer.source}" if layer.source else ""
    if layer.data:
        return f"step {layer.first_step}: in the data, which no layer made: {counts}{_input_of(layer)}"
    where = f"{layer.module or 'the model'} ({layer.direction})"
    what = f"the gradient that reaches {where}" if layer.op == "input" else f"{where} {layer.op}"
    return f"step {layer.first_step}: {what}{at}: {counts}"


def _counts(layer: Layer, seen: Seen) -> str:
    kinds = [(kind, count) for kind, count in (("inf", seen.inf), ("NaN", seen.nan)) if count]
    if not layer.counted:
        return f"{' and '.join(kind for kind, _ in kinds)} among its {layer.dtype} values"
    return f"{' and '.join(f'{kind} in {count}' for kind, count in kinds)} of {seen.numel} {layer.dtype} values"


def _input_of(layer: Layer) -> str:
    return f" (input of {layer.module})" if layer.module else ""


def text_of(report: OverflowReport) -> str:
    """The line, then a table of what overflowed, the earliest first, and of the layers with the least headroom."""
    columns = ("module", "direction", "op", "source", "dtype", "first step", "headroom", "amax", "zero", "subnormal")
    steps = f"steps {report.steps[0]} to {report.steps[-1]}" if report.steps else "no steps"
    rows = [_of_layer(layer) for layer in report.by_urgency[:SHOWN]]
    parts: list[RenderableType] = [headline(report), _table(f"headroom in powers of two, {steps}", columns, rows)]
    if len(report.layers) > SHOWN:
        parts.append(f"{len(report.layers) - SHOWN} more in report.layers")
    return _printed(parts)


def _of_layer(layer: Layer) -> tuple[str, ...]:
    op = layer.op if layer.kind == "activation" else f"{layer.op} ({layer.kind})"
    first = "-" if layer.first_step is None else str(layer.first_step)
    finite = layer.amax_before if layer.first_step is not None else layer.history[-1].amax if layer.history else None
    amax = "-" if finite is None else number(finite)
    shares = tuple("-" if share is None else f"{share:.1%}" for share in (layer.underflow, layer.subnormal))
    place = (layer.module or "-", layer.direction, op, layer.source.split(" in ")[0] or "-", layer.dtype)
    return (*place, first, f"{layer.headroom:.1f}", amax, *shares)


def number(value: float) -> str:
    """``5.1e+04``; "-" for a NaN, which stands for no value at all."""
    return "-" if value != value else f"{value:.3g}"


def _of_range(role: str, each: Range) -> tuple[str, ...]:
    numbers = tuple(map(number, (each.min, each.max, each.amax)))
    return role, each.name, each.dtype, each.shape, *numbers, each.non_finite or "-"


def _printed(parts: Sequence[RenderableType]) -> str:
    console = Console(width=150, no_color=True, highlight=False, markup=False, soft_wrap=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
