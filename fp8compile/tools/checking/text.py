"""What a check found, as a table of at most MOST_LINES lines: gradients below the bar first, the rest in one line."""

from __future__ import annotations

import math

from fp8compile.tools.checking.rows import BELOW, IN_CODE, OK, ROUNDING, Cause, GradientRow

MOST_LINES, MOST_ROWS, MOST_CAUSES, WORST_OK = 25, 9, 2, 3
WIDTH = 150


def text_of(
    rows: tuple[GradientRow, ...],
    outputs: tuple[GradientRow, ...],
    bar: float,
    steps: int,
    line: str,
    remarks: tuple[str, ...],
) -> str:
    """A headline, the gradients below the bar with their causes, the line to paste, the others summarised."""
    below = tuple(row for row in rows if row.verdict == BELOW)
    lines = [_headline(rows, len(below), bar, steps)]
    shown = _shown(below)
    for row in below[:shown]:
        lines += _lines_of(row)
    if len(below) > shown:
        lines.append(f"  and {len(below) - shown} more below the bar")
    lines += _cure(rows, line)
    lines += [_others(rows), _generated(rows, outputs), *(f"remark: {remark}" for remark in remarks)]
    return "\n".join(filter(None, lines))


def _headline(rows: tuple[GradientRow, ...], wrong: int, bar: float, steps: int) -> str:
    verdict = f"{wrong} of {len(rows)} gradients below {bar:g} dB" if wrong else "no gradient below the bar"
    if not wrong and rows:
        verdict = f"all {len(rows)} gradients at {bar:g} dB or above"
        verdict += ", or rounding" if any(row.verdict == ROUNDING for row in rows) else ""
    return f"fp8compile.check: {verdict} ({steps} steps; the exact step in the model's own dtypes is the reference)"


def _shown(below: tuple[GradientRow, ...]) -> int:
    """How many rows fit, with their causes."""
    room, shown = MOST_LINES - 8, 0
    for row in below[:MOST_ROWS]:
        room -= len(_lines_of(row))
        if room < 0:
            break
        shown += 1
    return shown


def _lines_of(row: GradientRow) -> list[str]:
    after = "" if math.isnan(row.repaired) else f" -> {decibels(row.repaired)} repaired"
    lines = [f"  {row.name}: {decibels(row.db)}{after}"]
    lines += [f"    {_cause(cause)}" for cause in row.causes[:MOST_CAUSES]]
    if len(row.causes) > MOST_CAUSES:
        lines.append(f"    and {len(row.causes) - MOST_CAUSES} more")
    return lines


def _cause(cause: Cause) -> str:
    what = "FP8 linear" if cause.kind == "linears" else "encoded in"
    alone = "" if math.isnan(cause.db) else f", alone {decibels(cause.db)}"
    more = f" and {len(cause.tensors) - 1} more" if len(cause.tensors) > 1 else ""
    text = f"{what} {cause.module or 'the model itself'}{alone}: {cause.tensors[0]}{more}"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _cure(rows: tuple[GradientRow, ...], line: str) -> list[str]:
    if not line:
        return []
    worst = min((row.repaired for row in rows if row.verdict in (OK, BELOW)), default=math.nan)
    return [f"to repair it (worst gradient then {decibels(worst)}):", f"  {line}"]


def _others(rows: tuple[GradientRow, ...]) -> str:
    fine = [row for row in rows if row.verdict == OK]
    noise = [row for row in rows if row.verdict == ROUNDING]
    worst = ", ".join(f"{row.name} {decibels(row.db)}" for row in fine[:WORST_OK])
    parts = [f"{len(fine)} well, worst {worst}"] if fine else []
    if noise:
        names = ", ".join(row.name for row in noise[:WORST_OK]) + (", ..." if len(noise) > WORST_OK else "")
        parts.append(f"{len(noise)} that rounding decides in the exact step too: {names}")
    return "; ".join(parts)


def _generated(rows: tuple[GradientRow, ...], outputs: tuple[GradientRow, ...]) -> str:
    """One line: what was generated beside its graph, which was run node by node; or that nothing was."""
    compared = [row for row in (*rows, *outputs) if not math.isnan(row.generated)]
    if not compared:
        return "no generated code was run: this is what the graphs give, run node by node"
    wrong = [row for row in compared if row.verdict == IN_CODE]
    if wrong:
        more = f", and {len(wrong) - WORST_OK} more" if len(wrong) > WORST_OK else ""
        return f"generated code is wrong where its graph is not: {', '.join(map(_beside, wrong[:WORST_OK]))}{more}"
    worst = min((row for row in compared if row.verdict == OK), key=lambda row: row.generated, default=None)
    return f"generated code as its graph, worst {_beside(worst)}" if worst else "generated code as its graph"


def _beside(row: GradientRow) -> str:
    graph = row.db if math.isnan(row.repaired) else row.repaired
    return f"{row.name} {decibels(row.generated)} (node by node {decibels(graph)})"


def decibels(db: float) -> str:
    """``12.3 dB``; ``exact`` for no difference at all."""
    return "exact" if db == math.inf else "not finite, or of nothing" if db == -math.inf else f"{db:.1f} dB"
