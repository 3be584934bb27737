"""The report as text: a first screen of at most 25 lines however deep the model is, and all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from fp8compile._text import WIDTH, human, printed, terminal_width
from fp8compile.reporting.entries import LINEAR, LOGITS, OFFLOAD, SAVED, Notes, SavedEntry, Skip
from fp8compile.reporting.tables import Entries, table_of
from fp8compile.reporting.waterfall import UNPAID, Amount, Waterfall, merged

LINES = 25  # of the first screen
MOST_PARTS, MOST_ROWS = 5, 5
LABEL = 36  # columns; with the numbers beside it fits 60
DETAILS = "more: report.{names}; report.why({module!r})"


def headline(recipe: str, kinds: Sequence[tuple[str, int]], saved_bytes: tuple[int, int], notes: Notes) -> list[str]:
    """What was compiled, what is saved, and how many linears multiply codes; ``kinds``: of the graphs and their runs."""
    ours, plain = saved_bytes
    share = f" ({ours / plain:.0%})" if plain else ""
    lines = [f"fp8compile: {_graphs(kinds)}, {recipe}"]
    lines += [f"saved for backward: {human(ours)}, plain Inductor {human(plain)}{share}"]
    if dear := [skip for skip in notes.skipped(SAVED) if _short(skip.reason) == UNPAID]:
        left_out = f"{len(dear)} tensors, {human(sum(skip.bytes for skip in dear))}"
        lines += [f'{UNPAID}: {left_out} stay as they are (saved.max_cost="any" stores them too)']
    done, left = len(notes.linears), notes.skipped(LINEAR)
    if done or left:
        lines += [f"linears: {done} of {done + len(left)} matmuls in {kind_of_codes(notes)}{_left(left)}"]
    if in_its_dtype := sum(linear.us_in_its_dtype for linear in notes.linears):
        ours_us = sum(linear.us for linear in notes.linears)
        lines += [
            f"these matmuls, predicted: {ours_us:,.0f} us with encodings, {in_its_dtype:,.0f} us in their dtype"
        ]
    if kept := notes.bytes_of_codes:
        lines += [f"weights encoded once: {len(kept)}, {human(sum(kept.values()))} of codes are kept"]
    for budget in notes.budgets:
        lines += [str(budget), *([budget.line] if budget.frontier else [])]
    lines += _on_host(notes)
    if notes.islands:
        lines += [f"{len(notes.islands)} FP32 islands of {sum(i.nodes for i in notes.islands)} nodes"]
    for each in notes.chunked:
        passes = " + ".join(map(str, (each.forward, *([each.sums] if each.sums else []), each.backward)))
        chunks = f"{passes} chunks of at most {human(each.bytes_after)}"
        lines += [f"logits: {human(each.bytes_before)} never exist, {chunks}"]
    for skip in notes.skipped(LOGITS):
        lines += [f"logits: {human(skip.info.nbytes)} are left ({skip.reason})"]
    if notes.collectives:
        before, after = (sum(getattr(c, name) for c in notes.collectives) for name in ("sent_plain", "sent"))
        lines += [
            f"{len(notes.collectives)} collectives: a rank sends {human(after)} of codes instead of {human(before)}"
        ]
    if notes.observed:
        lines += [f"{len(notes.observed)} values observed: fp8compile.tools.overflow_report(model)"]
    return lines


def kind_of_codes(notes: Notes) -> str:
    """FP8 where no linear is in INT8."""
    kinds = {"INT8" if linear.formats.startswith("int8") else "FP8" for linear in notes.linears}
    return " or ".join(sorted(kinds)) or "FP8"


def _on_host(notes: Notes) -> list[str]:
    """What waits on the host, what its copies take, and why the rest does not."""
    went, left = notes.offloaded, notes.skipped(OFFLOAD)
    if not went:
        return [f"offloaded to the host: nothing{_left(left)}"] if left else []
    size, us, waits = (sum(getattr(each, name) for each in went) for name in ("bytes", "us", "waits_us"))
    times = f"{us:,.0f} us of copies each way, {waits:,.0f} us not hidden (predicted for {went[0].device})"
    return [f"offloaded to the host: {len(went)} tensors, {human(size)}, {times}{_left(left)}"]


def _graphs(kinds: Sequence[tuple[str, int]]) -> str:
    texts = []
    for kind, count in Counter(kind for kind, _ in kinds).items():
        texts.append(f"{count} {kind} graph{'s' if count > 1 else ''}")
    runs = [runs for kind, runs in kinds if kind == "training"]
    if any(times > 1 for times in runs):
        texts[-1] += f" ({sum(runs)} runs in a step)"
    if idle := sum(times == 0 for times in runs):
        texts.append(f"{idle} of them not run in the last step")
    return ", ".join(texts) or "no graph"


def _left(skips: Sequence[Skip]) -> str:
    reasons = Counter(skip.reason for skip in skips)
    shown = [f"{count} left ({reason})" for reason, count in reasons.most_common(1)]
    more = sum(count for _, count in reasons.most_common()[1:])
    return "".join(f"; {text}" for text in [*shown, *([f"{more} for other reasons"] if more else [])])


def bytes_table(plain: int, ours: int, waterfall: Waterfall) -> list[RenderableType]:
    """The waterfall: from plain Inductor's bytes to ours, and what ours hold."""
    shortened = merged(replace(part, label=_short(part.label)) for part in waterfall.parts)
    parts = sorted(shortened, key=lambda part: -part.nbytes)
    if len(parts) > MOST_PARTS:
        more = parts[MOST_PARTS - 1 :]
        others = Amount(f"{len(more)} other reasons", sum(p.nbytes for p in more), sum(p.tensors for p in more))
        parts = [*parts[: MOST_PARTS - 1], others]
    rows = [Amount("plain Inductor", plain)]
    rows += [Amount(f"  {c.label}", c.nbytes, c.tensors) for c in waterfall.changes]
    rows += [Amount("fp8compile", ours)]
    rows += [Amount(f"  {part.label}", part.nbytes, part.tensors) for part in parts]
    grid = Table(box=None, pad_edge=False, header_style="")
    grid.add_column("saved for backward", no_wrap=True)
    grid.add_column("tensors", justify="right", no_wrap=True)
    grid.add_column("bytes", justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(_cut(row.label, LABEL), f"{row.tensors:,}" if row.tensors else "", f"{row.nbytes:,}")
    return [grid]


def _short(reason: str) -> str:
    return reason.split(": ")[0]


def first_screen(
    head: Sequence[str], amounts: Sequence[RenderableType], tables: Sequence[Entries[Any]], remarks: Sequence[str]
) -> list[RenderableType]:
    """The head, the bytes, the largest of what was stored, remarks, and where to find more."""
    said = [f"remark: {_cut(remark, 2 * terminal_width() - 12)}" for remark in remarks[:2]]
    if len(remarks) > 2:
        said.append(f"{len(remarks) - 2} more in report.remarks")
    filled = [entries for entries in tables if entries]
    names = ", .".join(_NAMES[entries.kind] for entries in filled)
    module = next((e.origin.module for entries in filled for e in entries if e.origin.module), "layers.0")
    last = [DETAILS.format(names=names, module=module)] if filled else []
    blank = [""]
    above = [*head, *blank * bool(amounts), *amounts]
    used = len(printed([*above, *said, *last], wrap=True, width=None).splitlines())
    room = min(MOST_ROWS, LINES - used - 3)  # a blank line, a title and a header stand above the rows
    largest = next((entries for entries in filled if entries.kind is SavedEntry), None)
    rows = table_of(largest, most=room) if largest and room > 0 else []
    return [*above, *blank * bool(rows), *rows, *said, *last]


_NAMES = {kind: name for name, kind in Notes.ENTRIES.items()}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def all_of_it(head: Sequence[str], amounts: Sequence[RenderableType], tables: Iterable[Entries[Any]]) -> Any:
    """The head, the bytes, and a table of each kind of entry."""
    return [
        *head,
        *amounts,
        *(part for entries in tables for part in ("", *table_of(entries, columns=WIDTH)) if entries),
    ]
