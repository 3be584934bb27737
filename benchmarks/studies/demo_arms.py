"""The demo trained by several arms from several seeds (``demo_runs``): the command line, the loop, rows, gaps.

Runs that the JSON already has are not run again; it is written after every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.demo_runs import Demo
from fp8compile.extras.demo.model import SIZES, Size
from fp8compile.extras.demo.results import Run, gap

Runs = dict[str, dict[str, Any]]  # rows by arm and seed
RESULTS = Path(__file__).resolve().parents[1] / "results"


def parse(
    words: Sequence[str] | None, description: str, name: str, arms: Sequence[str], reference: str, separator: str
) -> argparse.Namespace:
    """The command line; ``name`` is that of the results file, ``separator`` stands between arms."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=RESULTS / name)
    about = f"separated by {separator!r}; the gap is to {reference!r}"
    parser.add_argument("--arms", default=separator.join(arms), help=about)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model: does it run?")
    arguments = parser.parse_args(words)
    arguments.arms = arguments.arms.split(separator)
    if unknown := set(arguments.arms) - set(arms):
        shown = f"{separator} "
        parser.error(f"unknown: {shown.join(sorted(unknown))}; known: {shown.join(arms)}")
    return arguments


def run_compiled(demo: Demo, seed: int, options: Mapping[str, Any] | None) -> tuple[Run, nn.Module | None]:
    """A run with torch.optim.AdamW through plain Inductor (None), or with these options of ours; and what was compiled."""
    compiled: list[nn.Module] = []

    def compile_model(model: nn.Module) -> nn.Module:
        if options is None:
            return torch.compile(model)
        compiled[:] = [torch.compile(model, backend="fp8compile", options=dict(options))]
        return compiled[0]

    run = demo.run(adamw, seed, compile_model=compile_model)
    return run, compiled[0] if compiled else None


def adamw(model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **settings)


def train(
    arguments: argparse.Namespace,
    compiled: bool,
    run_arm: Callable[[str, int, Demo], dict[str, Any]],
    summary: Callable[[Runs], dict[str, Any]],
    most_seeds: Mapping[str, int] | None = None,
    size: Size = SIZES["cpu"],
    products: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Every arm from every seed, ready for JSON.

    Args:
        most_seeds: the most seeds of an arm.
        size: the model and its batches; with ``--quick`` a tiny one.
        products: dtype of matmuls; bfloat16: under autocast.
    """
    steps, seeds = (3, 1) if arguments.quick else (arguments.steps, arguments.seeds)
    size = replace(SIZES["tiny"], rate=1e-3) if arguments.quick else size
    demo = Demo(size, steps, compiled=compiled, evaluate_at=(steps // 2,), products=products)
    before = json.loads(arguments.json.read_text()) if arguments.json.exists() and not arguments.quick else {}
    fits = before.get("training", {}).get("steps") == steps
    runs: Runs = before["runs"] if fits else {}
    found: dict[str, Any] = {}
    for seed in range(seeds):
        for arm in arguments.arms:
            if seed < (most_seeds or {}).get(arm, seeds) and str(seed) not in runs.get(arm, {}):
                runs.setdefault(arm, {})[str(seed)] = {**run_arm(arm, seed, demo), **environment()}
                print(f"{arm} {seed}: {runs[arm][str(seed)]['validation_loss']:.4f}", file=sys.stderr, flush=True)
            found = {**demo.about(), **environment(), "summary": summary(runs), "runs": runs}
            write_json(arguments.json, found)
    return found


def shown(found: dict[str, Any], table: Callable[[Mapping[str, Any]], Table]) -> dict[str, Any]:
    """What was found, after people have seen it."""
    Console(width=120).print(table(found))
    return found


def row_of(run: Run) -> dict[str, Any]:
    """What every row says of its run."""
    return {
        "validation_loss": run.validation_loss,
        "train_loss": run.train_loss,
        "validation": [[e.step, e.loss] for e in run.evaluations],
        "losses": [round(loss, 5) for loss in run.losses],
        "median_step_s": statistics.median(run.step_seconds),
    }


def gaps_to(reference: str, runs: Mapping[str, Mapping[str, Any]], arm: str) -> list[float]:
    """The arm's gap to the reference for each seed that both finished."""
    plain = runs.get(reference, {})
    pairs = [(row, plain[seed]) for seed, row in runs.get(arm, {}).items() if seed in plain]
    return [gap(ours["validation_loss"], theirs["validation_loss"]) for ours, theirs in pairs]
