"""A results file as Markdown: for every benchmark a table, a line for each case and arm.

ratio    the reference arm's seconds over this arm's, all laps together: above 1 this arm is faster
%        of the copy bandwidth, or of the product's rate, that the same process measured
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fp8compile._text import human

if TYPE_CHECKING:
    from benchmarks.harness.results import Results

REFERENCES = ("inductor", "torch fused", "inductor, two kernels", "inductor, one reduction", "bf16 products", "eager")


def markdown(results: Results) -> str:
    """The whole file."""
    head = results.head
    lines = [f"# {head['device']}", "", f"{_versions(head)}; begun {head['began']}."]
    if head["tiny"]:
        lines += ["", f"**Tiny**: {head['what_tiny_means']}."]
    lines += _reached(row["rates"] for row in results.rows.values() if "rates" in row)
    for benchmark in dict.fromkeys(row["benchmark"] for row in results.rows.values()):
        rows = [row for row in results.rows.values() if row["benchmark"] == benchmark]
        lines += ["", f"## {benchmark}", "", *table(rows), *_absent(rows)]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """One benchmark's rows."""
    lines = ["| case | arm | ms | ratio | % | memory |", "|---|---|---|---|---|---|"]
    for row in rows:
        for arm, laps in row.get("arms", {}).items():
            times = ", ".join(f"{name} {lap['seconds'] * 1e3:.3f}" for name, lap in laps.items())
            cells = (
                row["case"],
                arm,
                times,
                _ratio(row, arm),
                ", ".join(_shares(laps)),
                ", ".join(notes(row, arm)),
            )
            lines.append(f"| {' | '.join(cells)} |")
        untimed = [arm for arm in row.get("capacity", {}) if arm not in row["arms"]]
        lines += [f"| {row['case']} | {arm} | | | | {', '.join(notes(row, arm))} |" for arm in untimed]
        if "says" in row:
            lines.append(f"| {row['case']} | | | | | {row['says']} |")
    return lines


def seconds(row: dict[str, Any], arm: str) -> float | None:
    """All laps of an arm together."""
    laps = row.get("arms", {}).get(arm)
    return sum(lap["seconds"] for lap in laps.values()) if laps else None


def reference_of(row: dict[str, Any]) -> str | None:
    """The arm that others are set against: the best-known way without this project."""
    return next((arm for arm in REFERENCES if arm in row.get("arms", {})), None)


def _reached(rates: Iterable[dict[str, float]]) -> list[str]:
    """What the processes of these rows measured of the machine, lowest to highest."""
    found = list(rates)
    lines = []
    for name, unit, words in (
        ("copy", 1e9, "GB/s copied"),
        ("bf16", 1e12, "TFLOP/s BF16"),
        ("fp8", 1e12, "TFLOP/s FP8"),
    ):
        if reached := sorted(each[name] / unit for each in found if name in each):
            lines.append(f"{reached[0]:.4g} to {reached[-1]:.4g} {words}")
    return ["", f"Measured in the same processes: {', '.join(lines)}."] if lines else []


def _ratio(row: dict[str, Any], arm: str) -> str:
    reference = reference_of(row)
    if reference is None or row["arms"][arm].keys() != row["arms"][reference].keys():
        return ""
    ours, theirs = seconds(row, arm), seconds(row, reference)
    return f"{theirs / ours:.2f}" if ours and theirs else ""


def _shares(laps: dict[str, dict[str, float]]) -> Iterator[str]:
    for lap in laps.values():
        share = lap.get("share_of_gemm") or lap.get("share_of_copy")
        if share:
            yield f"{share:.0%}"


def notes(row: dict[str, Any], arm: str) -> Iterator[str]:
    """What was found of an arm beside its times."""
    memory = row.get("memory", {}).get(arm, {})
    if "kept_units" in memory:
        yield f"kept {memory['kept_units']:.2f} U"
        yield f"worst gradient {memory['worst_gradient_db']:.1f} dB"
    if "peak_bytes" in memory:
        yield f"peak {human(memory['peak_bytes'])}"
    for name in ("peak", "weights", "gradients", "states", "activations", "rest"):
        if name in memory:
            yield f"{name} {human(memory[name])}"
    if arm in row.get("state_bits_per_parameter", {}):
        yield f"{row['state_bits_per_parameter'][arm]:.2f} bits/parameter"
    if arm in row.get("tokens_per_second", {}):
        yield f"{row['tokens_per_second'][arm]:.0f} tokens/s"
    for what, answer in row.get("capacity", {}).get(arm, {}).items():
        yield f"largest {what} {answer['largest']}" + (f", {answer['fails']} did not fit" if answer["fails"] else "")


def _absent(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Each reason once, and the rows that failed."""
    rows = list(rows)
    reasons = dict.fromkeys((arm, why) for row in rows for arm, why in row.get("left_out", {}).items())
    lines = [f"- {arm}: left out, {why}" for arm, why in reasons]
    lines += [f"- {row['case']}: {row['error']}" for row in rows if "error" in row]
    return ["", *lines] if lines else []


def _versions(head: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in head["versions"].items())
