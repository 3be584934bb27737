"""The 8-bit paper's ablation in small: which of dynamic codes, blocks and the stable embedding keep 8-bit AdamW stable.

    python benchmarks/studies/bench_stability.py

States of 8 and of 32 bits (``reproduce.stability_runs``) over hyperparameters varied one at a time around a base: eps,
beta1, beta2 of Dettmers et al. 2021 (table 3), learning rate. For each way of storing: the share of runs that diverge, and
the median gap of the final loss to the 32-bit run with the same hyperparameters and embedding, over settings where neither
diverges.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.batches import text
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.papers.small_model import HIDDEN, LENGTH, ROWS, byte_entropy
from benchmarks.papers.stability_runs import TO_ZERO, Setting, diverged, final_loss, train
from fp8compile.reporting.figure import empty_figure

BASE = Setting(lr=1e-2)
AROUND: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("eps", (1e-8, 1e-7, 1e-6)),
    ("beta1", (0.90, 0.87, 0.93)),
    ("beta2", (0.999, 0.99, 0.98)),
    ("lr", (3e-3, 1e-2, 3e-2)),
)
STATES = (
    ("fp32", False),
    ("dynamic", False),
    ("dynamic", True),
    ("linear", False),
    ("linear", True),
    (f"dynamic{TO_ZERO}", False),
    (f"dynamic{TO_ZERO}", True),
    (f"linear{TO_ZERO}", False),
    (f"linear{TO_ZERO}", True),
)


def settings() -> list[Setting]:
    """The base, and every value of one hyperparameter at a time."""
    varied = [replace(BASE, **{name: value}) for name, values in AROUND for value in values]
    return list(dict.fromkeys([BASE, *varied]))


def way(states: str, tensorwise: bool) -> str:
    return states if states == "fp32" else f"{states}, {'tensorwise' if tensorwise else 'blocks'}"


Rows = list[dict[str, Any]]


def run_all(each: Sequence[Setting], states: Sequence[tuple[str, bool]], steps: int, compiled: bool) -> Rows:
    """A row for each setting, embedding and way of storing."""
    rows, entropy = [], byte_entropy(text())
    for kind, tensorwise in states:
        start = time.perf_counter()
        for setting in (replace(s, stable=stable) for s in each for stable in (False, True)):
            losses = train(setting, kind, tensorwise, steps, compiled, text())
            ended = {
                "steps": len(losses),
                "final_loss": _finite(final_loss(losses)),
                "diverged": diverged(losses, entropy),
            }
            rows.append({"states": way(kind, tensorwise), **asdict(setting), **ended})
        print(f"{way(kind, tensorwise)}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return rows


def _finite(x: float) -> float | None:
    return x if abs(x) < float("inf") else None  # JSON has neither inf nor NaN


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By way of storing and embedding: the share that diverged, the median gap to 32 bits."""
    found: dict[str, Any] = {}
    for states in dict.fromkeys(row["states"] for row in rows):
        for stable in (False, True):
            here = [row for row in rows if row["states"] == states and row["stable"] == stable]
            gaps = [gap for row in here if (gap := _gap(row, rows)) is not None]
            found[f"{states}, {'stable' if stable else 'plain'} embedding"] = {
                "runs": len(here),
                "diverged": sum(row["diverged"] for row in here) / len(here),
                "median_gap": statistics.median(gaps) if gaps else None,
                "largest_gap": max(gaps) if gaps else None,
                "median_loss": _median([row["final_loss"] for row in here if not row["diverged"]]),
            }
    return found


def _gap(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Relative, to the 32-bit run with the same setting; None if either diverged."""
    same = ("lr", "eps", "beta1", "beta2", "stable", "seed")
    twin = next(r for r in rows if r["states"] == "fp32" and all(r[key] == row[key] for key in same))
    return None if row["diverged"] or twin["diverged"] else row["final_loss"] / twin["final_loss"] - 1


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def plot(found: dict[str, Any], path: Path) -> None:
    """Left: the share that diverged. Right: final losses of the others, in one row per way of storing."""
    made, grid = empty_figure(1, 2, 11, 5.2)
    left, right = grid[0]
    names = list(found["summary"])
    for i, name in enumerate(names):
        states, _, embedding = name.rpartition(", ")
        colour = "#4477aa" if embedding.startswith("stable") else "#cc4411"
        left.barh(i, 100 * found["summary"][name]["diverged"], color=colour)
        here = [r for r in found["runs"] if r["states"] == states and r["stable"] == embedding.startswith("stable")]
        ends = [r["final_loss"] for r in here if not r["diverged"]]
        right.scatter(ends, [i] * len(ends), 16, colour)
    left.set_yticks(range(len(names)), names)
    right.set_yticks(range(len(names)), [])
    for axes in (left, right):
        axes.set_ylim(len(names) - 0.5, -0.5)
    left.set(xlabel="% of runs that diverged", xlim=(0, 100))
    right.set(xlabel=f"loss after {found['steps']} steps, nats per byte, of those that did not")
    made.savefig(path, dpi=110)


def table(found: dict[str, Any]) -> Table:
    made = Table("states, embedding", "runs", "diverged", "median gap to 32 bits", "largest", "median loss")
    for name, row in found["summary"].items():
        gaps = ("-" if row[key] is None else f"{row[key]:+.2%}" for key in ("median_gap", "largest_gap"))
        loss = "-" if row["median_loss"] is None else f"{row['median_loss']:.3f}"
        made.add_row(name, str(row["runs"]), f"{row['diverged']:.0%}", *gaps, loss)
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What keeps 8-bit AdamW stable.")
    results = Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("--json", type=Path, default=results / "stability-cpu.json")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps of two ways of storing: does it run?")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(words)
    each = [replace(s, seed=seed) for seed in range(arguments.seeds) for s in settings()]
    each, states, steps = ([BASE], STATES[:3:2], 3) if arguments.quick else (each, STATES, arguments.steps)
    rows = run_all(each, states, steps, compiled=not arguments.quick)
    model = {"hidden": HIDDEN, "layers": 1, "context": LENGTH, "windows": ROWS, "vocabulary": 256}
    found = {
        "model": model,
        "steps": steps,
        "base": asdict(BASE),
        "byte_entropy": byte_entropy(text()),
        **environment(),
    }
    found |= {"summary": summary(rows), "runs": rows}
    write_json(arguments.json, found)
    plot(found, arguments.json.with_suffix(".png"))
    Console(width=140).print(table(found))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
