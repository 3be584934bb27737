"""The tables of the FP16 arms: one row per way to scale the loss. Losses are means over the runs that did not diverge."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from fp8compile._text import human
from fp8compile.extras.demo.arms import HISTOGRAM, SCALED_ARMS
from fp8compile.extras.demo.loss_scales import LEAST_PROGRESS, power_text
from fp8compile.extras.demo.model import warm_up_steps
from fp8compile.extras.demo.results import DONE, INTERRUPTED, Results, Run, mean_of

NONE = "-"
LOSSES = ("train loss", "validation loss", "gap", "diverged")
SCALES = ("skipped", "last scale", "after warm-up", "saved / step", "step")


def tables(results: Results) -> list[Table]:
    """Two tables with a row per arm: the losses; the scales and what a step takes."""
    return [_table(results, LOSSES, _losses), _table(results, SCALES, _scales)]


def _table(results: Results, titles: tuple[str, ...], row: Callable[[Results, str], tuple[str, ...]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="")
    made.add_column("arm", no_wrap=True)
    for title in titles:
        made.add_column(title, justify="right")
    for arm in results.arms:
        made.add_row(arm, *row(results, arm))
    return made


def notes(results: Results) -> list[str]:
    """What the columns mean, and every run that did not end well."""
    ends = [(run, results.divergence(run) or run.status) for run in results.runs]
    return [
        *_histogram_note(results),
        "loss: nats per byte, of runs that did not diverge; train loss: mean of the last tenth of the steps; gap: to fp32",
        f"diverged: a loss or parameter not finite, or less than {LEAST_PROGRESS:.0%} of fp32's progress by the end",
        f"skipped: steps left out for an inf or NaN; after warm-up: the scale after step {warm_up_steps(results.steps)}"
        " and its own first rise",
        *(f"{run.arm}, seed {run.seed}: {status}" for run, status in ends if status != DONE),
    ]


def _cell(runs: list[Run], value: Callable[[Run], float | None], form: Callable[[float], str]) -> str:
    mean = mean_of(map(value, runs))
    return form(mean.mean) if mean else NONE


def _losses(results: Results, arm: str) -> tuple[str, ...]:
    ended = [run for run in results.compared(arm) if run.status in (DONE, INTERRUPTED)]
    sound = [run for run in ended if not results.divergence(run)]
    gap = None if arm == results.reference else mean_of(results.gaps(arm, {run.seed for run in sound}))
    return (
        _cell(sound, lambda r: r.train_loss, "{:.4f}".format),
        _cell(sound, lambda r: r.validation_loss, "{:.4f}".format),
        NONE if gap is None else f"{gap.mean:+.2%}" + ("" if gap.error is None else f" ± {gap.error:.2%}"),
        _diverged(results, results.of(arm)),
    )


def _scales(results: Results, arm: str) -> tuple[str, ...]:
    runs = results.of(arm)
    return (
        _cell(runs, lambda r: float(r.skipped), "{:.3g}".format) if arm in SCALED_ARMS else NONE,
        ", ".join(dict.fromkeys(power_text(run.scales[-1]) for run in runs if run.scales)) or NONE,
        _range(results, runs),
        _cell(runs, lambda r: r.saved_bytes, human),
        _cell(runs, lambda r: r.median_step_s, lambda s: f"{s * 1e3:.0f} ms"),
    )


def _diverged(results: Results, runs: list[Run]) -> str:
    judged = [(run, verdict) for run in runs if (verdict := results.divergence(run)) is not None]
    if len(judged) != 1:
        return f"{sum(bool(verdict) for _, verdict in judged)} of {len(judged)}" if judged else NONE
    ((run, verdict),) = judged
    if run.status == DONE:
        return "by the end" if verdict else "no"
    return f"step {len(run.scales)}"


def _range(results: Results, runs: list[Run]) -> str:
    courses = [course for run in runs if (course := results.course(run))]
    if not courses:
        return NONE
    low, high = min(c.lowest for c in courses), max(c.highest for c in courses)
    return power_text(low) if low == high else f"{power_text(low)} to {power_text(high)}"


def _histogram_note(results: Results) -> list[str]:
    runs = [(run, course) for run in results.of(HISTOGRAM) if (course := results.course(run))]
    if not runs:
        return []
    factor = max(course.factor for _, course in runs)
    near = min(course.within_4 for _, course in runs)
    return [
        f"histogram: the scale moves within a factor {factor:g} after the warm-up; {near:.0%} of those steps are within a "
        f"factor 2 of the run's median, to either side"
    ]
