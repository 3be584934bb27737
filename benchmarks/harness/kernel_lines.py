"""The table of kernels: a line for each lap of each arm, predicted, and measured where it was, beside its peers.

Rates are of the least bytes or operations that a lap must do, on both sides; "moved" is what its code moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.kernel_prices import LOWERED, PRODUCTS, Price, price, rate
from benchmarks.harness.kernel_reads import HOST_BOUND, Measured
from benchmarks.harness.measured_sections import table
from benchmarks.harness.results import key_of

PREDICTED = (
    *("moved, MB", "instructions an element", "registers", "spilled, bytes", "launches"),
    *("predicted µs", "rate", "of the card", "bound by"),
)
MEASURED = ("read µs", "rate read", "of the card", "predicted / read")
PEERS: Mapping[str, tuple[str, ...]] = {  # a column, and the beginnings of its arms
    "torch": ("eager", "torch fused"),
    "Inductor": ("inductor",),
    "torchao": ("torchao",),
    "Liger": ("liger",),
    "FlashOptim": ("flashoptim",),
}
OTHER_KERNEL, NOT_LOWERED = "another kernel then", "not lowered"
NO_LONGER, NO_LESS = "≤ ", "≥ "  # of a time that a host may have drawn out, and of its rate


def lines(rows: Sequence[Mapping[str, Any]], measured: Measured | None, whole: bool) -> list[str]:
    """The table in Markdown, then which peers are missing, and why.

    Args:
        rows: of counts, from a results file.
        measured: what stands beside the predictions; None: nothing.
        whole: all shapes, where else a typical one stands for its kernel.
    """
    chosen = [row for row in _with_unpriced(rows, measured) if whole or row["typical"] or _was_read(row, measured)]
    peers = _peers_of(chosen, measured) if measured else {}
    head = ["kernel", "arm", *PREDICTED, *((*MEASURED, *peers) if measured else ())]
    cells = [_cells(row, measured, peers) for row in chosen]
    made = table(head, cells)
    return [*made, "", *_errors(chosen, measured), *_missing(chosen, measured)] if measured else made


def _peers_of(rows: Iterable[Mapping[str, Any]], measured: Measured) -> Mapping[str, tuple[str, ...]]:
    """The columns of peers that were timed beside any of the rows."""
    timed = {arm for row in rows for arm in measured.rows.get(_key(row), {}).get("arms", {})}
    return {name: arms for name, arms in PEERS.items() if any(arm.startswith(arms) for arm in timed)}


def _with_unpriced(rows: Sequence[Mapping[str, Any]], measured: Measured | None) -> Iterator[Mapping[str, Any]]:
    """The rows, and those that were measured and have none."""
    yield from rows
    known = {(row["benchmark"], row["case"], row["arm"], row["lap"]) for row in rows}
    for key, row in (measured.rows if measured else {}).items():
        benchmark, case = key.split(": ", 1)
        for arm, laps in row.get("arms", {}).items():
            for lap, found in laps.items():
                if (arm.startswith(LOWERED) or arm in PRODUCTS) and (benchmark, case, arm, lap) not in known:
                    head = {"benchmark": benchmark, "case": case, "arm": arm, "lap": lap, "typical": True}
                    yield {**head, "least": found, "no_price": NOT_LOWERED}


def _was_read(row: Mapping[str, Any], measured: Measured | None) -> bool:
    return measured is not None and measured.few and bool(measured.lap(*_where(row)))


def _where(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["benchmark"], row["case"], row["arm"], row["lap"]


def _key(row: Mapping[str, Any]) -> str:
    return key_of(row["benchmark"], row["case"])


def _cells(row: Mapping[str, Any], measured: Measured | None, peers: Mapping[str, tuple[str, ...]]) -> list[str]:
    found = price(row)
    cells = [f"{row['benchmark']} {row['case']}, {row['lap']}", row["arm"], *_predicted(row, found)]
    if measured is None:
        return cells
    beside = (_peer(row, measured, arms) if row["arm"].startswith("ours") else "" for arms in peers.values())
    return [*cells, *_read(row, found, measured), *beside]


def _predicted(row: Mapping[str, Any], found: Price | None) -> Iterable[str]:
    if found is None:
        return (f"**no price: {row['no_price']}**", *[""] * (len(PREDICTED) - 1))
    in_words, share = rate(row["least"], found.us)
    moved = f"{found.num_bytes / 1e6:,.0f}{_over_least(row, found)}"
    spilled = f"**{found.spilled}**" if found.spilled else "0"
    of_code = (_instructions(found), str(found.registers), spilled) if found.registers else ("library", "", "")
    return (
        moved,
        *of_code,
        str(found.launches),
        _us(found.us),
        in_words,
        f"{share:.0%}",
        found.bound,
    )


def _over_least(row: Mapping[str, Any], found: Price) -> str:
    ratio = found.num_bytes / row["least"]["bytes"]
    return f" ({ratio:.2f} ×)" if ratio >= 1.005 else ""


def _instructions(found: Price) -> str:
    slow = f" ({found.slow:.1f} slow)" if found.slow and found.slow >= 0.05 else ""
    return f"{found.instructions:.0f}{slow}"


def _read(row: Mapping[str, Any], found: Price | None, measured: Measured) -> Iterable[str]:
    benchmark, case, arm, _ = _where(row)
    if not (lap := measured.lap(*_where(row))):
        return [""] * len(MEASURED)
    us = lap["seconds"] * 1e6
    in_words, share = rate(row["least"], us, measured.reached(benchmark, case))
    ratio = f"{found.us / us:.2f}" if found and not lap.get(HOST_BOUND) else ""
    if measured.is_of_other_kernels(benchmark, arm):
        ratio = OTHER_KERNEL
    in_words = (NO_LESS if lap.get(HOST_BOUND) else "") + in_words
    return _read_us(lap), in_words, f"{share:.0%}", ratio


def _peer(row: Mapping[str, Any], measured: Measured, beginnings: tuple[str, ...]) -> str:
    """Microseconds of the arms of a peer in the same lap."""
    arms, lap = measured.rows.get(_key(row), {}).get("arms", {}), row["lap"]
    times = {arm: laps[lap] for arm, laps in arms.items() if arm.startswith(beginnings) and lap in laps}
    return "; ".join(f"{_read_us(each)}{_variant(arm) if len(times) > 1 else ''}" for arm, each in times.items())


def _variant(arm: str) -> str:
    return f" ({arm.split(' ', 1)[-1]})"


def _missing(rows: Sequence[Mapping[str, Any]], measured: Measured) -> list[str]:
    """Peers and rows without a figure, each with the reason once."""
    keys = {_key(row) for row in rows}
    held = [row for key, row in measured.rows.items() if key in keys]
    reasons = dict.fromkeys(f"{arm}: {why}" for row in held for arm, why in row.get("left_out", {}).items())
    reasons |= dict.fromkeys(f"{key}: {row['error']}" for key, row in measured.rows.items() if "error" in row)
    told = {arm for row in held for arm in row.get("left_out", {})}
    never = [name for name in PEERS if name not in _peers_of(rows, measured)]
    hidden = [name for name in never if not any(arm.startswith(PEERS[name]) for arm in told)]
    reasons |= dict.fromkeys(f"{name}: not timed there" for name in hidden)
    return [f"- {reason}" for reason in reasons]


def _errors(rows: Iterable[Mapping[str, Any]], measured: Measured) -> Iterator[str]:
    """How far predictions are off, of generated kernels and of library calls."""
    found: dict[str, list[float]] = {"Generated kernels": [], "Library matmuls": []}
    for row in rows:
        lap, cost = measured.lap(*_where(row)), price(row)
        other = lap.get(HOST_BOUND) or measured.is_of_other_kernels(row["benchmark"], row["arm"])
        if lap and cost and not other:
            kind = "Generated kernels" if cost.registers else "Library matmuls"
            found[kind].append(math.log(cost.us / lap["seconds"] / 1e6))
    for kind, logs in found.items():
        if logs:
            off = math.sqrt(sum(each * each for each in logs) / len(logs))
            yield f"- {kind}: off by {off * 100:.0f} % ({len(logs)} read), root of the mean square of log(predicted / read)"


def _read_us(lap: Mapping[str, Any]) -> str:
    return (NO_LONGER if lap.get(HOST_BOUND) else "") + _us(lap["seconds"] * 1e6)


def _us(us: float) -> str:
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"
