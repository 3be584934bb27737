"""The section of docs/results.md that is the table of formats: bytes, gradients, training, published figures, lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.measured_sections import gap, load, source, table
from benchmarks.papers.outcome import NOT_FOUND

NAME, TRAINING = "formats-cpu.json", "format-training-cpu.json"
STATE_BITS, STATE_TRAINING = "optimizer-states-cpu.json", "optimizer-training-cpu.json"
STATE_BARS, STATE_LOWERED = "state-bars-cpu.json", "optimizer-sm90-lowered.json"
STATES = {  # by the name in STATE_TRAINING: those in STATE_BITS, STATE_BARS, STATE_LOWERED, and of COAT's pairs
    "e4m3_expanded": ("e4m3_expanded", "e4m3_expanded", "FP32", ("E4M3 + Expand", "E4M3 + Expand")),
    "dynamic_tree": ("dynamic_tree", "", "", ("DE8", "DE8")),
    "mix": ("dynamic_tree / e4m3_expanded", "", "COAT's mix", ("DE8", "E4M3 + Expand")),
    "int8_companded": ("int8_companded", "", "companded", None),
    "4bit": ("4bit", "4bit", "", None),
    "4bit_log": ("4bit_log", "4bit_log", "", None),
    "2bit v": ("int4_companded / log2", "int4_companded / log2", "", None),
}
PLAIN, UNKNOWN = "plain", "-"


def formats(folder: Path) -> list[str]:
    found, trained = load(folder, NAME), load(folder, TRAINING)
    return [
        source(NAME, found),
        source(TRAINING, trained),
        *_told(trained),
        "",
        *_main(found, trained["summary"]),
        "",
        f"Worst (median) gradient of each model, dB.{_taken_over(found['models'])}",
        "",
        *_models(list(found["bytes"]), found["models"]),
        "",
        *_states(folder),
        "",
        *_unbiased(found),
    ]


def _told(trained: Mapping[str, Any]) -> list[str]:
    model, batch, steps = trained["model"], trained["batch"], trained["training"]["steps"]
    return [
        "Saved formats store, and their linears stay in BF16; attention's operands are in 8 bits.",
        "Linears multiply, and store no more than their operands' codes.",
        "FP8 codes are emulated here, INT8 codes by rows are not, those by blocks are.",
        "",
        "- *Bytes*: of one encoded element, scales counted, of a matrix of 1,024 x 1,024.",
        "- *Layer*: a Llama layer (hidden 512, 512 tokens, BF16) on the CPU: what it saves, and its worst (median) gradient.",
        "- *Five models*: the worst gradient of all, and the median of their medians.",
        "- *Gap*: the validation loss over that of plain Inductor in BF16 from the same seed, minus 1. Mean ±",
        f"  standard error, 95 % interval, seeds. The demo in small: {model['layers']} layers, hidden {model['hidden']},"
        f" {batch['windows']} windows of {batch['bytes_per_window']} bytes, {steps} steps.",
        "- *Lowered*: that layer for an H100, without one: kernels forward + backward, and the bytes that they move, in U.",
        "  What matmuls and attention move is left out. Blocks are emulated there too.",
        "- *Published*: what a source says that could be read.",
        "",
        "`e5m2` is no format of saved activations. It is that of gradients in `linears tensorwise` and `linears rowwise`.",
        'A Llama\'s "auto" is `int8`, tensor by tensor.',
        'Where the gap is "-", nothing was trained. [Blocks are here](#training-in-modes-of-scaling).',
        "INT8 by rows ends below BF16 here. What causes that was not looked into.",
    ]


def _main(found: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    head = ("format", "bytes", "layer, U", "layer, dB", "five models, dB", "gap", "published", "lowered")
    return table(head, [_row(name, found, summary) for name in (PLAIN, *found["bytes"])])


def _row(name: str, found: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, ...]:
    layer = found["layer"].get(name)
    return (
        name,
        f"{found['bytes'][name]:.4f}" if name in found["bytes"] else "2",
        f"{layer['units']:.2f}" if layer else UNKNOWN,
        _pair(layer) if layer else UNKNOWN,
        _over_models(name, found["models"]),
        _gap(summary.get(name)),
        found["published"].get(name, NOT_FOUND) if name != PLAIN else "",
        _lowered(found["lowered"].get(name)),
    )


def _pair(row: Mapping[str, Any]) -> str:
    return f"{row['worst_db']:.1f} ({row['median_db']:.1f})"


def _over_models(name: str, models: Mapping[str, Any]) -> str:
    rows = {model: each[name] for model, each in models.items() if name in each}
    if not rows:
        return UNKNOWN
    worst = min(rows, key=lambda model: float(rows[model]["worst_db"]))
    middle = median(row["median_db"] for row in rows.values())
    some = "" if len(rows) == len(models) else f", {len(rows)} models"
    return f"{rows[worst]['worst_db']:.1f}, {worst} ({middle:.1f}){some}"


def _gap(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return UNKNOWN
    half = row["half_95"]
    interval = "" if half is None else f", [{row['gap'] - half:+.2%}, {row['gap'] + half:+.2%}]"
    return f"{gap(row['gap'], row['error'])}{interval}, {row['seeds']}"


def _lowered(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return UNKNOWN
    kernels = " + ".join(str(graph["launches"]) for graph in row["graphs"])
    return f"{kernels}, {sum(graph['num_bytes'] for graph in row['graphs']) / row['unit_bytes']:.1f} U"


def _models(names: Sequence[str], models: Mapping[str, Any]) -> list[str]:
    rows = [
        (name, *(_pair(rows[name]) if name in rows else UNKNOWN for rows in models.values()))
        for name in (PLAIN, *names)
    ]
    return table(("format", *models), rows)


def _taken_over(models: Mapping[str, Any]) -> str:
    """Which rows are another file's."""
    rows = {name: row["from"] for each in models.values() for name, row in each.items() if "from" in row}
    return f" From [Few bits](#few-bits): {', '.join(rows)}." if rows else ""


def _states(folder: Path) -> list[str]:
    found = {name: load(folder, name) for name in (STATE_BITS, STATE_TRAINING, STATE_BARS, STATE_LOWERED)}
    coat = load(folder, "reproduce-coat-cpu.json")["tables"][0]["rows"]
    published = {(row["m in"], row["v in"]): row["published x"] for row in coat}
    return [
        f"Optimizer states, the demo whole, products in FP32 ([figures](../benchmarks/results/{STATE_TRAINING})).",
        "Bytes are those of both moments of an element. NMSE is the largest of ten steps; FlashOptim's bar is 0.01.",
        "The gap is to FP32 states, with the number of seeds. Published is COAT's error over that of E4M3 + Expand.",
        "Lowered are kernels of a step, and bytes over the least.",
        "",
        *table(
            ("states", "bytes", "NMSE of updates", "gap", "published", "lowered"),
            [_state(name, found, published) for name in STATES],
        ),
        "",
        "Gradients sent as FP8 codes (`compress_gradients`): one byte each way, and a scale per tensor; rounded twice.",
        "No training was run with it.",
    ]


def _state(name: str, found: Mapping[str, Any], published: Mapping[tuple[str, str], float]) -> tuple[str, ...]:
    in_bits, in_bars, in_lowered, pair = STATES[name]
    seen = found[STATE_TRAINING]["summary"].get(name)
    case = found[STATE_LOWERED]["cases"].get(in_lowered)
    return (
        name,
        f"{found[STATE_BITS]['bits'][in_bits]['parameters']['state_bits'] / 8:.3f}",
        f"{max(found[STATE_BARS]['update'][in_bars].values()):.4f}" if in_bars else UNKNOWN,
        f"{gap(seen['gap'], seen['error'])}, {seen['seeds']}" if seen else UNKNOWN,
        NOT_FOUND if pair is None else f"{published[pair]:.2f}",
        f"{case['kernels']}, {case['ratio']:.2f} x" if case else UNKNOWN,
    )


def _unbiased(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"{bits} bits", dtype, f"{row['largest_mean_error']:.4f}", f"{row['allowed']:.4f}")
        for dtype, each in found["unbiased"].items()
        for bits, row in each.items()
    ]
    return [
        f"Unbiased: every finite value of a half dtype below 2^127, among its neighbours, {found['draws']:,} draws each.",
        "The largest mean error of any value, in steps, and what chance allows once in a million runs (Hoeffding's bound",
        "over 65,536 values, and 2^-13).",
        "",
        *table(("saved", "values", "largest mean error", "allowed"), rows),
    ]
