"""Overflow reports as text: one line with the first overflow, then a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from fp8compile._text import printed, table
from fp8compile.observe.history import StepStats, ValueHistory, by_severity, first_overflow, steps_of

SHOWN = 24  # lines of a report's table


def headline(layers: Sequence[ValueHistory]) -> str:
    """The first overflow, or how near the nearest value is to one."""
    if (first := first_overflow(layers)) is not None:
        return line_of(first)
    nearest = min(layers, key=lambda layer: layer.headroom, default=None)
    near = (
        "" if nearest is None else f"; {nearest.name} is nearest, 2^{nearest.headroom:.1f} below the largest number"
    )
    return f"no inf and no NaN in {len(steps_of(layers))} step(s) of {len(layers)} values{near}"


def line_of(layer: ValueHistory) -> str:
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


def _counts(layer: ValueHistory, seen: StepStats) -> str:
    kinds = [(kind, count) for kind, count in (("inf", seen.inf), ("NaN", seen.nan)) if count]
    if not layer.counted:
        return f"{' and '.join(kind for kind, _ in kinds)} among its {layer.dtype} values"
    return f"{' and '.join(f'{kind} in {count}' for kind, count in kinds)} of {seen.numel} {layer.dtype} values"


def _input_of(layer: ValueHistory) -> str:
    return f" (input of {layer.module})" if layer.module else ""


def text_of(layers: Sequence[ValueHistory]) -> str:
    """The line, then a table of what overflowed, the earliest first, and of the layers with the least headroom."""
    columns = ("module", "direction", "op", "source", "dtype", "first step", "headroom", "amax", "zero", "subnormal")
    kept = steps_of(layers)
    steps = f"steps {kept[0]} to {kept[-1]}" if kept else "no steps"
    rows = [_of_layer(layer) for layer in by_severity(layers)[:SHOWN]]
    parts: list[RenderableType] = [headline(layers), table(f"headroom in powers of two, {steps}", columns, rows)]
    if len(layers) > SHOWN:
        parts.append(f"{len(layers) - SHOWN} more in report.layers")
    return printed(parts)


def _of_layer(layer: ValueHistory) -> tuple[str, ...]:
    op = layer.op if layer.kind == "activation" else f"{layer.op} ({layer.kind})"
    first = "-" if layer.first_step is None else str(layer.first_step)
    finite = layer.amax_before if layer.first_step is not None else layer.history[-1].amax if layer.history else None
    amax = "-" if finite is None else number(finite)
    shares = tuple("-" if share is None else f"{share:.1%}" for share in (layer.underflow, layer.subnormal))
    place = (layer.module or "-", layer.direction, op, layer.source.split(" in ")[0] or "-", layer.dtype)
    return (*place, first, f"{layer.headroom:.1f}", amax, *shares)


def number(value: float) -> str:
    """``5.1e+04``; "-" for a NaN, which means that there is no value."""
    return "-" if value != value else f"{value:.3g}"
