"""Dettmers et al. 2021 (2110.02861) in small: what keeps 8-bit Adam stable, and how sensitive it is.

    32-bit; 8-bit linear; 8-bit dynamic; each with one scale per tensor or per block; each with a plain and a stable embedding

over eps, beta1, beta2 and learning rate around a base, one at a time: the share of runs that diverge (``stability_runs``) and
the gap to 32 bits with the same settings. Codes are the paper's, whose small second moments become 0; below them ours, whose
never do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.papers.outcome import Outcome, Table
from benchmarks.papers.small_model import byte_entropy, training_text
from benchmarks.papers.stability_runs import TO_ZERO, Setting, diverged, final_loss, train
from fp8compile.reporting.figure import empty_figure

BASE = Setting(lr=1e-2)
AROUND: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("eps", (1e-8, 1e-7, 1e-6)),
    ("beta1", (0.87, 0.90, 0.93)),
    ("beta2", (0.98, 0.99, 0.999)),
    ("lr", (3e-3, 1e-2, 3e-2)),
)
FP32 = "32-bit"
WAYS: Mapping[str, tuple[str, bool]] = {
    FP32: ("fp32", False),
    "8-bit linear": (f"linear{TO_ZERO}", True),
    "8-bit linear, blocks": (f"linear{TO_ZERO}", False),
    "8-bit dynamic": (f"dynamic{TO_ZERO}", True),
    "8-bit dynamic, blocks": (f"dynamic{TO_ZERO}", False),
    "8-bit linear, blocks, v kept above 0": ("linear", False),
    "8-bit dynamic, blocks, v kept above 0": ("dynamic", False),
}  # states, and whether one scale serves the whole tensor
SOURCES = (
    "the abstract alone: 8-bit states keep the performance of 32-bit ones with the same hyperparameters; the "
    "ablation's own figures were not found"
)
SHORT = 20  # steps below which nothing is compiled
WHOLE = "8-bit dynamic, blocks"


@dataclass(frozen=True)
class EightBitRun:
    """One training; ``loss`` is the mean of its last tenth."""

    way: str
    setting: Setting
    loss: float
    diverged: bool


def reproduce(seeds: int, steps: int, tell: Callable[[str], None]) -> Outcome:
    """Every way of storing, embedding and setting, from each seed."""
    text = training_text()
    entropy, runs = byte_entropy(text), []
    for way, (states, tensorwise) in WAYS.items():
        for setting in settings(seeds):
            losses = train(setting, states, tensorwise, steps, steps > SHORT, text)
            runs.append(EightBitRun(way, setting, final_loss(losses), diverged(losses, entropy)))
        here = [run for run in runs if run.way == way]
        tell(f"{way}: {sum(run.diverged for run in here)} of {len(here)} runs diverged")
    tables = (ablation(runs), sensitivity(runs))
    figures = {"byte_entropy": entropy, "runs": [asdict(run) for run in runs]}
    return Outcome(difference(steps), SOURCES, tables, lambda path: draw(runs, path), findings(runs), figures)


def difference(steps: int) -> str:
    return (
        f"1 layer x 128 on bytes for {steps} steps, AdamW, blocks of 128 (the paper: 2048), a rate so high that few steps "
        "show who is unstable; the paper trains language models of up to 1.5 billion parameters"
    )


def settings(seeds: int) -> list[Setting]:
    """The base and every value of one hyperparameter at a time, with both embeddings, for each seed."""
    varied = [with_value(BASE, name, value) for name, values in AROUND for value in values]
    each = dict.fromkeys([BASE, *varied])
    return [replace(s, stable=stable, seed=seed) for s in each for stable in (False, True) for seed in range(seeds)]


def with_value(setting: Setting, name: str, value: float) -> Setting:
    """The setting with another value of one hyperparameter."""
    return Setting(**(asdict(setting) | {name: value}))


def gap(run: EightBitRun, runs: Iterable[EightBitRun]) -> float | None:
    """Relative, to the 32-bit run with the same setting; None if either diverged."""
    twin = next(each for each in runs if each.way == FP32 and each.setting == run.setting)
    return None if run.diverged or twin.diverged else run.loss / twin.loss - 1


def ablation(runs: Sequence[EightBitRun]) -> Table:
    """A row for each way of storing and embedding."""
    rows = []
    for way in dict.fromkeys(run.way for run in runs):
        for stable in (False, True):
            here = [run for run in runs if run.way == way and run.setting.stable == stable]
            base = [r.loss for r in here if replace(r.setting, stable=False, seed=0) == BASE and not r.diverged]
            gaps = [each for run in here if (each := gap(run, runs)) is not None]
            rows.append(
                (
                    way,
                    "stable" if stable else "plain",
                    f"{sum(run.diverged for run in here)} of {len(here)}",
                    statistics.fmean(base) if base else None,
                    f"{statistics.median(gaps):+.2%}" if gaps else None,
                    f"{max(gaps):+.2%}" if gaps else None,
                )
            )
    columns = ("states", "embedding", "diverged", "loss at the base", "median gap", "largest gap")
    return Table("Settings that diverge, loss in nats per byte, gap to 32 bits", columns, tuple(rows))


def sensitivity(runs: Sequence[EightBitRun]) -> Table:
    """Loss of 32 bits and of the whole method at each value of each hyperparameter, both with a stable embedding."""
    rows = []
    for name, values in AROUND:
        for value in values:
            setting = with_value(replace(BASE, stable=True), name, value)
            ends = []
            for way in (FP32, WHOLE):
                found = [r for r in runs if r.way == way and replace(r.setting, seed=0) == setting]
                sound = [r.loss for r in found if not r.diverged]
                ends.append(statistics.fmean(sound) if len(sound) == len(found) else None)
            full, coded = ends
            change = f"{coded / full - 1:+.2%}" if coded is not None and full is not None else "diverged"
            rows.append((name, f"{value:g}", full, coded, change))
    columns = ("varied", "value", "32-bit", WHOLE, "gap")
    return Table("Sensitivity with a stable embedding: loss, nats per byte", columns, tuple(rows))


def findings(runs: Sequence[EightBitRun]) -> tuple[str, ...]:
    """Divergence by what is left out, and how far 8 bits follow 32 over all settings."""
    kinds = {"linear codes": "8-bit linear", "dynamic codes": "8-bit dynamic"}
    shares = []
    for what, start in kinds.items():
        here = [r for r in runs if r.way.startswith(start) and "kept" not in r.way]
        shares.append(f"{what} {sum(r.diverged for r in here) / len(here):.0%}")
    whole = [r for r in runs if r.way == WHOLE and r.setting.stable]
    gaps = [each for run in whole if (each := gap(run, runs)) is not None]
    worst = f"{max(map(abs, gaps)):.2%}" if gaps else "-"
    return (
        f"Runs that diverge where small second moments become 0: {', '.join(shares)}.",
        f"{WHOLE}, stable embedding: {sum(r.diverged for r in whole)} of {len(whole)} diverge, {worst} from 32 bits at most.",
    )


def draw(runs: Sequence[EightBitRun], path: Path) -> None:
    """Left: the share that diverged. Right: losses of the others."""
    made, grid = empty_figure(1, 2, 12, 5)
    left, right = grid[0]
    names = [(way, stable) for way in dict.fromkeys(run.way for run in runs) for stable in (False, True)]
    for i, (way, stable) in enumerate(names):
        here = [run for run in runs if run.way == way and run.setting.stable == stable]
        colour = "#4477aa" if stable else "#cc4411"
        left.barh(i, 100 * sum(run.diverged for run in here) / len(here), color=colour)
        ends = [run.loss for run in here if not run.diverged and math.isfinite(run.loss)]
        right.scatter(ends, [i] * len(ends), 16, colour)
    left.set_yticks(range(len(names)), [f"{way}, {'stable' if s else 'plain'}" for way, s in names], fontsize="small")
    right.set_yticks(range(len(names)), [])
    for axes in (left, right):
        axes.set_ylim(len(names) - 0.5, -0.5)
    left.set(xlabel="% of runs that diverged", xlim=(0, 100))
    right.set(xlabel="loss at the end, nats per byte, of those that did not")
    made.savefig(path, dpi=110)
