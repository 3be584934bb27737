"""The tables at the end: a column per arm, means over the seeds; and how the losses fell. They fit 60 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from fp8compile._text import human
from fp8compile.extras.demo import fp16_table
from fp8compile.extras.demo.arms import EAGER, FP32, OURS, REFERENCE
from fp8compile.extras.demo.loss_curve import curve_table
from fp8compile.extras.demo.results import DONE, INTERRUPTED, Mean, Results, Run, gap_sentence, mean_of

WIDTH = 80  # of the tables; prose in a file is not wrapped
NONE = "-"
NOT_TRAINED = "eager, untrained"
Cell = Callable[[str], str]


def summary(results: Results, width: int | None = None) -> str:
    """The tables and the sentences around them, as plain text.

    Args:
        width: columns of the terminal, where prose is wrapped. None: a line for each sentence.
    """
    tables = fp16_table.tables(results) if results.reference == FP32 else [_table(results)]
    tables += [curve_table(results)] if any(run.losses for run in results.runs) else []
    console = Console(width=min(width or WIDTH, WIDTH), no_color=True, highlight=False, markup=False)
    prose = Console(width=width or WIDTH, no_color=True, highlight=False, markup=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
            console.print()
    with prose.capture() as headline:
        prose.print("\n".join(_headline(results)), soft_wrap=width is None)
    notes = fp16_table.notes(results) if results.reference == FP32 else _notes(results)
    with prose.capture() as below:
        prose.print("\n".join(notes), soft_wrap=width is None)
    text = "\n".join([headline.get(), capture.get().rstrip("\n"), "", below.get().rstrip("\n")])
    return "\n".join(line.rstrip() for line in text.splitlines())


def _headline(results: Results) -> list[str]:
    size = results.size
    seeds = f"seed {results.seeds[0]}" if len(results.seeds) == 1 else f"{len(results.seeds)} seeds"
    return [
        *_interruption(results),
        f"Llama of {size.layers} layers x {size.hidden}, {size.batch} windows of {size.length} bytes, "
        f"{results.steps} steps, {seeds}, no dropout",
        f"precision: {results.precision.why}",
        *([f"{OURS}: {results.recipe}"] if OURS in results.arms or results.reference == FP32 else []),
    ]


def _interruption(results: Results) -> list[str]:
    """Where the demo was interrupted, and what is compared in that case."""
    step = results.interrupted_at
    if step is None:
        return []
    seed = next(run.seed for run in results.runs if run.status == INTERRUPTED)
    if step == 0 and results.gap_step is None:
        return ["INTERRUPTED before every arm had taken its first step: there is nothing to compare"]
    if results.gap_step == results.steps:
        return [f"INTERRUPTED in seed {seed}, at step {step} of {results.steps}: losses are of the seeds before it"]
    after = results.gap_step
    validation = (
        f"the validation losses are those after step {after}" if after else "no validation loss was taken by then"
    )
    return [
        f"INTERRUPTED at step {step} of {results.steps}: all arms have taken it, and are compared there; {validation}"
    ]


def _table(results: Results) -> Table:
    """A row per measure, a column per arm."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("")
    eager = EAGER not in results.arms
    for title in (*([NOT_TRAINED] if eager else []), *results.arms):
        table.add_column(title, justify="right")
    saved = human(results.eager_saved_bytes) if results.eager_saved_bytes else NONE
    for measure, cell in _measures(results).items():
        first = [saved if measure == "saved / step" else NONE] if eager else []
        table.add_row(measure, *first, *map(cell, results.arms))
    return table


def _measures(results: Results) -> dict[str, Cell]:
    """What each row shows of an arm."""

    def mean(value: Callable[[Run], float | None], form: Callable[[float], str], compared: bool = False) -> Cell:
        def cell(arm: str) -> str:
            found = mean_of(map(value, results.compared(arm) if compared else results.of(arm)))
            return form(found.mean) if found else NONE

        return cell

    def gap(arm: str) -> str:
        return NONE if arm == REFERENCE else _percent(mean_of(results.gaps(arm)))

    tokens = results.size.tokens_per_step
    return {
        "train loss": mean(lambda r: r.train_loss, "{:.4f}".format, compared=True),
        "validation loss": mean(lambda r: r.validation_loss, "{:.4f}".format, compared=True),
        "gap": gap,
        "saved / step": mean(lambda r: r.saved_bytes, human),
        "peak memory": mean(lambda r: r.peak_bytes, human),
        "step": mean(lambda r: r.median_step_s, lambda s: f"{s * 1e3:.0f} ms"),
        "tokens/s": mean(lambda r: r.median_step_s, lambda s: f"{tokens / s:,.0f}"),
        "compile": mean(lambda r: r.compile_s, lambda s: f"{s:.1f} s"),
    }


def _percent(mean: Mean | None) -> str:
    if mean is None:
        return NONE
    return f"{mean.mean:+.2%}" + (f" ± {mean.error:.2%}" if mean.error is not None else "")


def _notes(results: Results) -> list[str]:
    notes = [gap_sentence(results)]
    ours, plain = (mean_of(run.saved_bytes for run in results.of(arm)) for arm in (OURS, REFERENCE))
    if ours and plain:
        notes.append(
            f"{OURS} keeps {ours.mean / plain.mean:.0%} of the bytes that {REFERENCE} keeps for the backward"
            f"{_report_note(results, ours.mean)}"
        )
    notes.append("loss: nats per byte; train loss: mean of the last tenth of the steps")
    notes.append("saved: bytes saved for backward as autograd holds them, parameters left out")
    notes.append("step: the median; arms take theirs in turns, so that both see the same machine")
    notes.append(f"compile: the first step less the median one{_cache_note(results)}")
    notes += [f"{run.arm}, seed {run.seed}: {run.status}" for run in results.runs if run.status != DONE]
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
