"""The two pictures: how the losses fell and how far apart they are; the bytes each arm saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8compile._text import human
from fp8compile.extras.demo.arms import ARMS, FP16_ARMS, FP32, OURS, REFERENCE, SCALED_ARMS
from fp8compile.extras.demo.loss_curve import smoothed
from fp8compile.extras.demo.results import LIMIT, Results, Run, gap, mean_of
from fp8compile.reporting.figure import empty_figure

COLOURS = dict(zip(ARMS, ("#4477aa", "#cc4411", "#777777"), strict=True))
COLOURS |= zip(FP16_ARMS, ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#cc4411"), strict=True)
DASHES = {REFERENCE: "-", FP32: "-", OURS: "--", "eager": ":"}
MIB = 2**20


def plot_losses(results: Results, path: Path) -> None:
    """The first seed's losses, training as a running mean; below, how far each arm is from Inductor."""
    figure, (losses, distance) = new_figure(rows=2, height_ratios=(3, 1.4), sharex=True)
    first = {arm: run for arm in results.arms if (run := next(iter(results.compared(arm)), None)) and run.losses}
    for run in first.values():
        _draw_losses(losses, run)
        if run.arm != results.reference and results.reference in first and not results.divergence(run):
            _draw_distance(distance, run, first[results.reference])
    distance.axhline(0, color=COLOURS[results.reference], linewidth=1)
    if results.reference == REFERENCE:
        distance.axhline(100 * LIMIT, color="black", linewidth=0.8, linestyle=":", label=f"limit, {LIMIT:+.1%}")
    losses.set(ylabel="loss, nats per byte", title=_loss_title(results))
    distance.set(ylabel=f"% above {results.reference}", xlabel=f"optimizer step (seed {results.seeds[0]})")
    for axes in (losses, distance):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def plot_saved_bytes(results: Results, path: Path) -> None:
    """MiB saved for backward in one step: eager, then the compiled arms."""
    figure, (axes,) = new_figure(rows=1)
    bars = saved_bars(results)
    for arm, nbytes in bars:
        bar = axes.bar(arm, nbytes / MIB, width=0.6, color=COLOURS[arm])
        axes.bar_label(bar, [_bar_text(nbytes, dict(bars).get(REFERENCE))], padding=3)
    axes.set(ylabel="MiB per step", title="Kept from forward to backward, parameters left out")
    axes.margins(y=0.15)
    figure.savefig(path, dpi=120)


def saved_bars(results: Results) -> list[tuple[str, float]]:
    """Names and bytes of the bars."""
    bars = [("eager", float(results.eager_saved_bytes))] if results.eager_saved_bytes else []
    for arm in results.arms:
        mean = mean_of(run.saved_bytes for run in results.of(arm))
        if mean is not None and arm != "eager":
            bars.append((arm, mean.mean))
    return bars


def _draw_losses(axes: Any, run: Run) -> None:
    smooth, colour, dashes = smoothed(run.losses), COLOURS[run.arm], DASHES.get(run.arm, "--")
    axes.plot(range(1, len(smooth) + 1), smooth, dashes, color=colour, label=f"{run.arm}, training")
    hidden = "_" if run.arm in SCALED_ARMS else ""  # seven arms are enough for a legend
    steps, values = zip(*((e.step, e.loss) for e in run.evaluations), strict=True)
    ring = {"s": 90, "facecolors": "none"} if run.arm not in (REFERENCE, FP32) else {"s": 36, "facecolors": colour}
    axes.scatter(steps, values, edgecolors=colour, zorder=3, label=f"{hidden}{run.arm}, validation", **ring)


def _draw_distance(axes: Any, run: Run, reference: Run) -> None:
    both = list(zip(smoothed(run.losses), smoothed(reference.losses), strict=False))
    colour = COLOURS[run.arm]
    axes.plot(range(1, len(both) + 1), [100 * gap(*pair) for pair in both], DASHES.get(run.arm, "--"), color=colour)
    ends = {e.step: e.loss for e in reference.evaluations}
    points = [(e.step, 100 * gap(e.loss, ends[e.step])) for e in run.evaluations if e.step in ends]
    axes.scatter(*zip(*points, strict=True), s=60, facecolors="none", edgecolors=colour, zorder=3)


def _bar_text(nbytes: float, plain: float | None) -> str:
    return human(nbytes) if not plain else f"{human(nbytes)}\n{nbytes / plain:.0%} of {REFERENCE}"


def _loss_title(results: Results) -> str:
    mean = mean_of(results.gaps())
    if results.reference == FP32:
        return f"Loss on Python source, FP16 with the loss scaled{_stopped(results)}"
    if mean is None:
        return f"Loss on Python source{_stopped(results)}"
    if results.interrupted and results.gap_step != results.steps:
        return f"Validation loss gap {mean.mean:+.2%} after step {results.gap_step}{_stopped(results)}"
    error = f" ± {mean.error:.2%} ({mean.n} seeds)" if mean.error is not None else " (one seed)"
    return f"Validation loss gap {mean.mean:+.2%}{error}, limit {LIMIT:+.1%}"


def _stopped(results: Results) -> str:
    return f", interrupted at step {results.interrupted_at} of {results.steps}" if results.interrupted else ""


def new_figure(rows: int, height_ratios: Sequence[float] | None = None, sharex: bool = False) -> tuple[Any, Any]:
    """A figure without a window, and its axes."""
    height = 4.8 if rows == 1 else 6.4
    figure, grid = empty_figure(rows, 1, 8, height, sharex=sharex, height_ratios=height_ratios)
    return figure, grid[:, 0]
