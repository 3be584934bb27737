"""Facts as Markdown: models by way, optimizers, kernels, what else was found, and what did not end well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.first import facts
from benchmarks.first.comparisons import MODELS, PLAIN, WAYS, Timed, pairs, timed
from benchmarks.first.facts import Fact

HEAD = ("", "ms: fastest (median)", "speed", "on the device, ms", "launches", "kept", "peak", "first step, s")


def document(found: Sequence[Fact]) -> str:
    """A file of facts."""
    return "\n".join(["# First contact", "", *whole(found), *_endings(found)]) + "\n"


def whole(found: Sequence[Fact]) -> list[str]:
    """All tables that there are facts for."""
    parts = (_models(found), _optimizers(found), _card(found), _kernels(found))
    return [line for part in parts if part for line in (*part, "")]


def _models(found: Sequence[Fact]) -> list[str]:
    rows = timed(found)
    plain = {id(row): of for of, row in pairs(rows)}
    cells: list[tuple[str, ...]] = []
    for model in dict.fromkeys(row.model for row in rows):
        cells.append((f"**{MODELS[model]}**", *[""] * (len(HEAD) - 1)))
        cells += [_model(row, plain.get(id(row))) for row in rows if row.model == model]
    return lines(HEAD, cells) if cells else []


def _model(row: Timed, plain: Timed | None) -> tuple[str, ...]:
    name = WAYS[row.way] + (f", optimizer {row.optimizer}" if row.optimizer else "")
    if not math.isfinite(row.fact.get("loss") or 0.0):
        name += " (**its loss was NaN**)"
    device = f"{row.profile['device_us'] / 1e3:.1f}" if row.profile else ""
    speed = f"{plain.fastest / row.fastest:.2f} ×" if plain is not None and row.way != PLAIN else ""
    first = "" if row.first is None else f"{row.first:.0f}"
    times = f"{row.fastest:.2f} ({row.fact['ms']:.2f})"
    return (name, times, speed, device, str(row.profile.get("launches", "")), row.kept, row.peak, first)


def _optimizers(found: Sequence[Fact]) -> list[str]:
    rows = {fact["job"].removeprefix("opt-"): fact for fact in found if fact["what"] == "optimizer"}
    head = ("AdamW's step, 256M BF16 parameters", "ms: fastest (median)", "bits of states")
    cells = [(name, f"{f['min_ms']:.2f} ({f['ms']:.2f})", f"{f['bits']:.2f}") for name, f in rows.items()]
    return lines(head, cells) if cells else []


def _card(found: Sequence[Fact]) -> list[str]:
    cells = []
    for fact in found:
        if fact["job"] == "card" or fact["job"] == "env":
            for name, unit in (("gb_s", "GB/s"), ("tflops", "TFLOP/s"), ("tflops_forward", "TFLOP/s forward")):
                if name in fact:
                    cells.append((str(fact["what"]), f"{fact[name]:,} {unit}"))
    return lines(("the card itself", ""), cells) if cells else []


def _kernels(found: Sequence[Fact]) -> list[str]:
    cells = [
        (fact["what"].removeprefix("kernel "), f"{fact['gb_s']:,}")
        for fact in found
        if fact["what"].startswith("kernel ") and "gb_s" in fact
    ]
    return lines(("codecs alone, 16384×4096", "GB/s of the bytes that must be moved"), cells) if cells else []


def _endings(found: Sequence[Fact]) -> list[str]:
    """Arms that did not end well, with the reason; then what the last run did not reach."""
    errors = {fact["job"]: fact["error"] for fact in found if fact["what"] == "error"}
    bad = {job: how for job, how in facts.outcomes(found).items() if how != facts.DONE}
    parts = [f"- {job}: {how}{_because(errors.get(job))}" for job, how in bad.items()]
    parts += [f"- {fact['job']}: {fact['what']}: {fact['error']}" for fact in found if _part_failed(fact)]
    over = [fact for fact in found if fact["what"] == "over"]
    if over and over[-1].get("not_reached"):
        parts.append(f"- not reached: {', '.join(over[-1]['not_reached'])}")
    return ["What did not end well:", "", *parts] if parts else []


def _because(error: str | None) -> str:
    return f" ({error.splitlines()[0][:160]})" if error else ""


def _part_failed(fact: Fact) -> bool:
    return "error" in fact and fact["what"] != "error"


def lines(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table."""
    made = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return made + [f"| {' | '.join(map(str, row))} |" for row in rows]
