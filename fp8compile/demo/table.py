"""The table at the end: one row per arm, means over the seeds."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from fp8compile._text import human
from fp8compile.demo import fp16_table
from fp8compile.demo.arms import EAGER, FP32, OURS, REFERENCE
from fp8compile.demo.results import Mean, Results, Run, gap_sentence, mean_of

WIDTH = 130
NONE = "-"
COLUMNS = (
    "train loss",
    "validation loss",
    "gap",
    "saved / step",
    "peak memory",
    "step",
    "tokens/s",
    "compile",
)


def summary(results: Results) -> str:
    """The table and the sentences below it, as plain text."""
    console = Console(width=WIDTH, no_color=True, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(fp16_table.table(results) if results.reference == FP32 else _table(results))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    notes = fp16_table.notes(results) if results.reference == FP32 else _notes(results)
    return "\n".join([*_headline(results), *lines, *notes])


def _headline(results: Results) -> list[str]:
    size = results.size
    seeds = f"seed {results.seeds[0]}" if len(results.seeds) == 1 else f"{len(results.seeds)} seeds"
    lines = [
        f"Llama of {size.layers} layers x {size.hidden}, {size.batch} windows of {size.length} bytes, "
        f"{results.steps} steps, {seeds}, no dropout",
        f"precision: {results.precision.why}",
        *([f"{OURS}: {results.recipe}"] if OURS in results.arms or results.reference == FP32 else []),
    ]
    return ["INTERRUPTED: this is what was measured until then", *lines] if results.interrupted else lines


def _table(results: Results) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("arm")
    for title in COLUMNS:
        table.add_column(title, justify="right")
    if EAGER not in results.arms:
        saved = human(results.eager_saved_bytes) if results.eager_saved_bytes else NONE
        table.add_row("eager, not trained", *[NONE] * 3, saved, *[NONE] * 4)
    for arm in results.arms:
        table.add_row(*_row(results, arm))
    return table


def _row(results: Results, arm: str) -> tuple[str, ...]:
    runs = results.of(arm)

    def cell(value: Callable[[Run], float | None], form: Callable[[float], str]) -> str:
        mean = mean_of(value(run) for run in runs)
        return form(mean.mean) if mean else NONE

    return (
        arm,
        cell(lambda r: r.train_loss, "{:.4f}".format),
        cell(lambda r: r.validation_loss, "{:.4f}".format),
        NONE if arm == REFERENCE else _percent(mean_of(results.gaps(arm))),
        cell(lambda r: r.saved_bytes, human),
        cell(lambda r: r.peak_bytes, human),
        cell(lambda r: r.median_step_s, lambda s: f"{s * 1e3:.0f} ms"),
        cell(lambda r: r.median_step_s, lambda s: f"{results.size.tokens_per_step / s:,.0f}"),
        cell(lambda r: r.compile_s, lambda s: f"{s:.1f} s"),
    )


def _percent(mean: Mean | None) -> str:
    if mean is None:
        return NONE
    return f"{mean.mean:+.2%}" + (f" ± {mean.error:.2%}" if mean.error is not None else "")


def _notes(results: Results) -> list[str]:
    notes = ["", gap_sentence(results)]
    ours, plain = (mean_of(run.saved_bytes for run in results.of(arm)) for arm in (OURS, REFERENCE))
    if ours and plain:
        notes.append(
            f"{OURS} keeps {ours.mean / plain.mean:.0%} of the bytes that {REFERENCE} keeps for the backward"
            f"{_report_note(results, ours.mean)}"
        )
    notes.append("loss: nats per byte; train loss: mean of the last tenth of the steps")
    notes.append("saved: bytes kept from forward to backward as autograd holds them, parameters left out")
    notes.append(f"compile: the first step less the median one{_cache_note(results)}")
    notes += [f"{run.arm}, seed {run.seed}: {run.status}" for run in results.runs if run.status != "done"]
    return notes


def _report_note(results: Results, measured: float) -> str:
    report = results.report
    if report is None:
        return ""
    same = report.saved_bytes == measured
    return "; its own report says the same" if same else f"; its own report says {human(report.saved_bytes)}"


def _cache_note(results: Results) -> str:
    warm = [arm for arm in results.arms if any(run.warm_cache for run in results.of(arm))]
    return f"; with code found in the compiler's cache on disk: {', '.join(warm)}" if warm else ""
