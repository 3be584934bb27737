"""The picture of loss scales: one line per arm over the steps, and the learning rate behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8compile.extras.demo.model import rate_schedule
from fp8compile.extras.demo.plots import COLOURS, new_figure
from fp8compile.extras.demo.results import Results


def plot_scales(results: Results, path: Path) -> None:
    """Every seed's scales; a cross where a run diverged."""
    figure, (axes,) = new_figure(rows=1)
    rate = rate_schedule(results.steps)
    draw_rate(axes, [results.size.rate * rate(step) for step in range(results.steps)])
    for arm in results.arms:
        runs = [run for run in results.of(arm) if run.scales]
        draw_scales(axes, {arm: [run.scales for run in runs]}, [bool(results.divergence(run)) for run in runs])
    axes.set(xlabel="optimizer step", title="Loss scale in FP16")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(path, dpi=120)


def draw_scales(axes: Any, scales: Mapping[str, Sequence[Sequence[float]]], diverged: Sequence[bool]) -> None:
    """``scales`` and ``diverged`` have an entry for each run of an arm."""
    for arm, runs in scales.items():
        for k, (each, ended) in enumerate(zip(runs, diverged, strict=True)):
            label = {"label": arm} if k == 0 else {}
            axes.step(range(1, len(each) + 1), each, where="mid", color=COLOURS[arm], linewidth=1.2, **label)
            if ended:
                axes.plot(len(each), each[-1], "x", color=COLOURS[arm], markersize=9, markeredgewidth=2)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")


def draw_rate(axes: Any, rates: Sequence[float]) -> None:
    """The learning rate as an area, on an axis of its own behind the lines."""
    behind = axes.twinx()
    behind.fill_between(range(1, len(rates) + 1), rates, color="#eeddaa", alpha=0.5, linewidth=0)
    behind.set_ylim(0, 1.05 * max(rates))
    behind.set_ylabel("learning rate (shaded)")
    behind.spines[["top"]].set_visible(False)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)
