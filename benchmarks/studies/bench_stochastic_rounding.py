"""Weights in FP16, updated to nearest or at random: a small ResNet on real images, SGD, batch 4.

    python benchmarks/studies/bench_stochastic_rounding.py        (needs scikit-learn, for its handwritten digits)

    arithmetic   forward and backward in FP32 or FP16, rounding to nearest; a convolution of FP16 operands accumulates in
                 FP32 and is rounded once, as GPUs do it (a CPU's own are slow)
    update       FP32: weights (a copy of them, under FP16 arithmetic) in FP32;   fp8compile.optim.SGD(master="fp32")
                 FP16, nearest: weights and step in FP16;                         torch.optim.SGD
                 FP16, stochastic: FP16 weights, the step in FP32, then SR;       fp8compile.optim.SGD(master="none")

A step smaller than half the spacing of FP16's values at a weight is lost to nearest, so the loss grows as the rate falls:
every arm runs at several rates. Neither momentum, nor weight decay, nor loss scaling; GroupNorm, since a batch is 4.
Graphcore's evidence (ResNet32, CIFAR-100): FP16 updates lose accuracy, stochastic rounding restores it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.papers.stochastic_rounding import ARMS, BATCH, load_images, train
from fp8compile.reporting.figure import empty_figure

RATES = (0.1, 0.01, 0.001, 0.0003)
FIRST = "FP32 / FP32"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, by "arithmetic / update", then by rate; ``excess``: training loss over that of FP32 / FP32."""
    by_arm: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        arm = by_arm.setdefault(f"{row['arithmetic']} / {row['update']}", {})
        arm.setdefault(str(row["rate"]), []).append(row)
    found: dict[str, Any] = {}
    for name, rates in by_arm.items():
        for rate, each in rates.items():
            means = {k: statistics.fmean(r[k] for r in each) for k in ("accuracy", "held_out_loss", "train_loss")}
            means["accuracy_error"] = _error([r["accuracy"] for r in each])
            means["excess"] = means["train_loss"] / statistics.fmean(r["train_loss"] for r in by_arm[FIRST][rate]) - 1
            found.setdefault(name, {})[rate] = means
    return found


def _error(values: list[float]) -> float:
    """Of the mean; 0 of one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def plot(found: dict[str, Any], path: Path) -> None:
    """Accuracy, and training loss against FP32's, over the rate, by arm."""
    made, grid = empty_figure(1, 2, 11, 4.4)
    colours = {"FP32": "#777777", "FP16 nearest": "#cc4411", "FP16 stochastic": "#4477aa"}
    for arm, rates in found["summary"].items():
        arithmetic, update = arm.split(" / ")
        style = {"color": colours[update], "linestyle": "-" if arithmetic == "FP32" else "--", "marker": "o", "ms": 4}
        at, each = [float(rate) for rate in rates], list(rates.values())
        errors = [100 * r["accuracy_error"] for r in each]
        label = f"arithmetic {arithmetic}, update {update}"
        grid[0, 0].errorbar(at, [100 * r["accuracy"] for r in each], errors, capsize=2, label=label, **style)
        grid[0, 1].plot(at, [100 * r["excess"] for r in each], **style)
    labels = "accuracy on held-out digits, %", "training loss, % above FP32 arithmetic and update"
    for axes, text in zip(grid[0], labels, strict=True):
        axes.set(xscale="log", xlabel="peak learning rate", ylabel=text)
    grid[0, 0].legend(frameon=False, fontsize="small")
    made.savefig(path, dpi=110)


def table(found: dict[str, Any]) -> Table:
    rates = list(next(iter(found["summary"].values())))
    columns = (f"rate {rate}" for rate in rates)
    made = Table("arithmetic / update", *columns, title="held-out accuracy (training loss)")
    for arm, by_rate in found["summary"].items():
        made.add_row(arm, *(f"{r['accuracy']:.1%} ({r['train_loss']:.4f})" for r in by_rate.values()))
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FP16 weights, rounded to nearest and stochastically.")
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "stochastic-rounding-cpu.json")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps at one rate: does it run?")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(words)
    rates, steps, seeds = (RATES[:1], 3, 1) if arguments.quick else (RATES, arguments.steps, arguments.seeds)
    images, rows = load_images(), []
    for arithmetic, update in ARMS:
        for rate, seed in ((r, s) for r in rates for s in range(seeds)):
            rows.append(train(arithmetic, update, rate, seed, images, steps))
            words_of = f"{arithmetic} / {update}, rate {rate}, seed {seed}: {rows[-1]['accuracy']:.1%}"
            print(f"{words_of}, {rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    model = {"about": "ResNet-8, widths 16, 32, 64, GroupNorm, 8 x 8 digits", "batch": BATCH, "steps": steps}
    found = {"model": model, **environment(), "summary": summary(rows), "runs": rows}
    write_json(arguments.json, found)
    plot(found, arguments.json.with_suffix(".png"))
    Console(width=140).print(table(found))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
