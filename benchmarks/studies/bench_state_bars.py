"""Other libraries' bars for optimizer states, restated, and what no code of so many bits can get below.

python benchmarks/studies/bench_state_bars.py

update     FlashOptim's test of updates: NMSE of what ten steps of AdamW (rate 0.1) have moved, against FP32 states; bar 0.01.
           Its gradients: alternating ones, 0, 1, 2 ... throughout, uniform in (0, 1); worst of 3 seeds and 2 starts.
           As matrices of 5 and 12 (each row a group) and flat (144: one full group). Ours beside them: normal gradients.
floor      The least mean square error of one encoding by so many levels, chosen for each group at will (dynamic
           programming over its sorted values): of 1 ... 127 relative to each value, and of 127 normal numbers.
round_trip FlashOptim's test of one round trip of a second moment: cosine above 0.9999, mean error under 1.6 / 255 of amax.
bf16       bitsandbytes' bound on BF16 weights after a step, 1.6e-3: mean relative distance to FP32's, by rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from fp8compile.numerics.states.registry import state_codec
from fp8compile.optim import AdamW

PAIRS: dict[str, Any] = {
    "4bit": "4bit",
    "4bit_log": "4bit_log",
    "int4_companded / fp32": ("int4_companded", "fp32"),
    "fp32 / log4": ("fp32", "log4"),
    "int4_companded / log2": ("int4_companded", "log2"),
    "fp32 / log2": ("fp32", "log2"),
    "dynamic4 / fp32": ("dynamic4", "fp32"),
    "fp32 / linear4": ("fp32", "linear4"),
    "e4m3_expanded": "e4m3_expanded",
}
SHAPES: dict[str, tuple[int, ...]] = {"rows of 5": (5, 5), "rows of 12": (12, 12), "flat, 144": (144,)}
STRATEGIES = ("ones", "const", "rand", "normal")
MASTERS = (None, "none", "split", "fp32", "fp16_scaled")
ROUND_TRIP_SHAPES = ((1, 5), (1, 12), (1, 16), (1, 17), (1, 32), (17, 32), (1024, 16))
STEPS, RATE, SEEDS = 10, 0.1, 3


def gradients(strategy: str, shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    """Ten gradients of FlashOptim's test, or of normal numbers."""
    count = torch.zeros(shape).numel()
    fixed = {"ones": torch.arange(count) % 2 * 2.0 - 1, "const": torch.arange(count).float()}
    draw = torch.rand if strategy == "rand" else torch.randn
    for _ in range(STEPS):
        yield fixed[strategy].reshape(shape) if strategy in fixed else draw(shape, generator=generator)


def moved(start: Tensor, each: Sequence[Tensor], state_format: Any) -> Tensor:
    """What ten steps have moved a parameter by."""
    p = nn.Parameter(start.clone())
    optimizer = AdamW([("w", p)], lr=RATE, weight_decay=0.1, overrides={"*": state_format}, compiled=False)
    for g in each:
        p.grad = g.clone()
        optimizer.step()
    return p.detach() - start


def update_nmse(state_format: Any, strategy: str, shape: tuple[int, ...]) -> float:
    """The worst normalised mean square error of three seeds and two starts."""
    worst = 0.0
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        cyclic = (torch.arange(torch.zeros(shape).numel()) // 2 % 5 - 2.0).reshape(shape)
        for start in (cyclic, torch.rand(shape, generator=generator) * 4 - 2):
            each = list(gradients(strategy, shape, generator))
            exact = moved(start, each, "fp32").double()
            off = moved(start, each, state_format).double() - exact
            worst = max(worst, float(off.square().sum() / exact.square().sum()))
    return worst


def least_error(values: Tensor, weights: Tensor, levels: int) -> float:
    """The least sum of w (x - level)**2 that so many levels allow, over sum of w x**2: exact, by dynamic programming."""
    x, order = values.double().sort()
    w = weights.double()[order]
    sums = [torch.cat([torch.zeros(1, dtype=torch.float64), t.cumsum(0)]) for t in (w, w * x, w * x * x)]
    n = len(x)
    i, j = torch.meshgrid(torch.arange(n + 1), torch.arange(n + 1), indexing="ij")
    total, first, second = (s[j] - s[i] for s in sums)
    cost = torch.where(j > i, second - first**2 / total.clamp_min(1e-300), torch.where(j == i, 0.0, torch.inf))
    best = cost[0]
    for _ in range(levels - 1):
        best = (best[:, None] + cost).amin(0)
    return float(best[n] / (w * x * x).sum())


def floors() -> dict[str, dict[str, float]]:
    """By distribution and levels; 7 and 15 are four bits with and without a sign, and 0 beside them."""
    ramp = torch.arange(1.0, 128)
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(127, generator=generator) for _ in range(20)]
    found: dict[str, dict[str, float]] = {"1 ... 127, relative": {}, "normal": {}}
    for levels in (3, 7, 15, 16):
        found["1 ... 127, relative"][str(levels)] = least_error(ramp, ramp**-2, levels)
        each = [least_error(x, torch.ones(127), levels) for x in normal]
        found["normal"][str(levels)] = sum(each) / len(each)
    return found


def round_trips(state_format: str, rounding: str) -> dict[str, int]:
    """Of FlashOptim's cases of a second moment, how many are out of each of its bounds."""
    codec, out = (
        state_codec(state_format, signed=False, rounding=rounding),
        {"cases": 0, "cosine": 0, "mean error": 0},
    )
    for shape in ROUND_TRIP_SHAPES:
        for kind in ("max", *["random"] * 10, *["small"] * 10, *["mixed"] * 10):
            generator = torch.Generator().manual_seed(out["cases"])
            x = torch.full(shape, 255.0) if kind == "max" else torch.randn(shape, generator=generator).abs()
            x = torch.rand(shape, generator=generator) * 0.01 if kind == "small" else x
            if kind == "mixed":
                x[: max(1, shape[0] // 2)] *= 0.1
                x[max(1, shape[0] // 2) :] *= 2
            x_hat = codec.decode(codec.encode(x), shape)
            out["cases"] += 1
            out["cosine"] += bool(torch.cosine_similarity(x.flatten(), x_hat.flatten(), 0) <= 0.9999)
            out["mean error"] += bool((x_hat - x).abs().mean() > 1.6 * x.max() / 255)
    return out


def bf16_distance(master: str | None, steps: int = 50) -> float:
    """The mean of |w - w32| / |w32| after some steps; None: torch's own on BF16 weights."""
    torch.manual_seed(0)
    start = torch.randn(128, 1024).bfloat16()
    ours, exact = nn.Parameter(start.clone()), nn.Parameter(start.float())
    made: Any = torch.optim.AdamW([ours], lr=1e-3)
    if master is not None:
        made = AdamW([("w", ours)], lr=1e-3, master=master, state_format="fp32", compiled=False)
    reference = torch.optim.AdamW([exact], lr=1e-3)
    for _ in range(steps):
        exact.grad = torch.randn(128, 1024)
        ours.grad = exact.grad.bfloat16()
        exact.grad = ours.grad.float()
        made.step()
        reference.step()
    return float(((ours.detach().float() - exact.detach()).abs() / exact.detach().abs().clamp_min(1e-3)).mean())


def tables(found: dict[str, Any]) -> list[Table]:
    update = Table("m / v", *found["update"]["4bit"], title="NMSE of ten steps; bar 0.01")
    for name, row in found["update"].items():
        update.add_row(name, *(f"{x:.4f}" for x in row.values()))
    rest = Table("what", "figures", title="the rest")
    for key in ("floor", "round_trip", "bf16"):
        for name, row in found[key].items():
            rest.add_row(f"{key}: {name}", str(row))
    return [update, rest]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Other libraries' bars for optimizer states.")
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "state-bars-cpu.json")
    parser.add_argument("--quick", action="store_true", help="one pair and one shape: does it run?")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(words)
    pairs = {"4bit": "4bit"} if arguments.quick else PAIRS
    shapes = {"rows of 5": (5, 5)} if arguments.quick else SHAPES
    cases = [(s, name, shape) for s in STRATEGIES for name, shape in shapes.items()]
    found = {
        **environment(),
        "update": {
            n: {f"{s}, {name}": update_nmse(f, s, shape) for s, name, shape in cases} for n, f in pairs.items()
        },
        "floor": floors(),
        "round_trip": {
            f"{fmt}, {how}": round_trips(fmt, how)
            for fmt in ("e4m3_expanded", "int8_companded", "log4")
            for how in ("nearest", "dithered")
        },
        "bf16": {
            f"{m or 'torch'}, {n} steps": bf16_distance(m, n)
            for m in MASTERS
            for n in ((1,) if arguments.quick else (1, 50))
        },
    }
    write_json(arguments.json, found)
    for table in tables(found):
        Console(width=160).print(table, "")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
