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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from fp8compile.optim import SGD
from fp8compile.reporting.figure import empty_figure

BATCH, CLASSES, HELD_OUT_ONE_IN = 4, 10, 5
RATES = (0.1, 0.01, 0.001, 0.0003)
DTYPES = {"FP32": torch.float32, "FP16": torch.float16}
FIRST = "FP32 / FP32"
ARMS = tuple((a, u) for a in DTYPES for u in ("FP32", "FP16 nearest", "FP16 stochastic"))


class Conv(nn.Conv2d):
    """A convolution without bias that accumulates in FP32; the result, and both gradients, have the operands' dtype."""

    def __init__(self, inside: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inside, width, kernel, stride, kernel // 2, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input.float(), self.weight.float(), None).to(input.dtype)


class Block(nn.Module):
    """ResNet's basic block, the shortcut a 1 x 1 convolution where the width changes."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        stride = 1 if inside == width else 2
        self.conv_1, self.conv_2 = Conv(inside, width, 3, stride), Conv(width, width, 3)
        self.norm_1, self.norm_2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.shortcut = nn.Identity() if inside == width else Conv(inside, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


def resnet(widths: Sequence[int] = (16, 32, 64)) -> nn.Module:
    """CIFAR's ResNet with one block per stage: 8 layers for three widths."""
    stem = [Conv(1, widths[0], 3), nn.GroupNorm(4, widths[0]), nn.ReLU()]
    blocks = [Block(a, b) for a, b in zip((widths[0], *widths), widths, strict=False)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


@dataclass(frozen=True)
class Images:
    """Images [n, 1, 8, 8] in [-1, 1] and their classes; every fifth is held out."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


def load_images() -> Images:
    """scikit-learn's handwritten digits."""
    try:
        from sklearn.datasets import load_digits  # type: ignore
    except ImportError:
        raise SystemExit("the images are scikit-learn's digits: pip install scikit-learn") from None
    found = load_digits()
    x, y = torch.from_numpy(found.images).float()[:, None] / 8 - 1, torch.from_numpy(found.target).long()
    held = torch.arange(len(y)) % HELD_OUT_ONE_IN == 0
    return Images((x[~held], y[~held]), (x[held], y[held]))


def optimizer_of(update: str, model: nn.Module, rate: float, compiled: bool) -> torch.optim.Optimizer:
    """What updates the weights of an arm; ``compiled``: the rounding, which is slow operation by operation."""
    if update == "FP16 nearest":
        return torch.optim.SGD(model.parameters(), lr=rate)
    if update == "FP32":
        return SGD(model.parameters(), lr=rate, master="fp32", compiled=False)
    return SGD(model.parameters(), lr=rate, master="none", compiled=compiled)


def train(arithmetic: str, update: str, rate: float, seed: int, images: Images, steps: int) -> dict[str, Any]:
    """One run; the rate decays to a tenth along a cosine."""
    torch.manual_seed(seed)
    dtype = DTYPES[arithmetic]
    kept = dtype if update == "FP32" else torch.float16
    model = resnet().to(kept)
    optimizer = optimizer_of(update, model, rate, compiled=steps > 100)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, rate / 10)
    generator, losses = torch.Generator().manual_seed(seed), []
    start = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(len(images.train[1]), (BATCH,), generator=generator)
        loss = F.cross_entropy(_logits(model, images.train[0][chosen], dtype), images.train[1][chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    with torch.no_grad():
        logits = _logits(model, images.held_out[0], dtype)
    last = torch.stack(losses)[-max(1, steps // 10) :]
    return {
        "arithmetic": arithmetic,
        "update": update,
        "rate": rate,
        "seed": seed,
        "accuracy": float((logits.argmax(1) == images.held_out[1]).float().mean()),
        "held_out_loss": float(F.cross_entropy(logits, images.held_out[1])),
        "train_loss": float(last.mean()),
        "seconds": time.perf_counter() - start,
    }


def _logits(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 logits; weights and images enter the arithmetic in ``dtype``, whatever the weights are kept in."""
    weights = {name: p.to(dtype) for name, p in model.named_parameters()}
    logits: Tensor = functional_call(model, weights, (x.to(dtype),))
    return logits.float()


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
