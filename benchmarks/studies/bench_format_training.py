"""The demo in small, trained in BF16 with every format of the table of formats, beside plain Inductor in BF16.

    python benchmarks/studies/bench_format_training.py --seeds 5
    python benchmarks/studies/bench_format_training.py --arms "plain;saved 4bit"

The model is the demo's of size "cpu" with 2 layers of 4; a batch is 4 windows of 128 bytes, not 8 of 256, so that seventeen
formats and five seeds take an hour and not ten. Every arm sees the same initial weights, batches, rates and clipping
(``demo_runs``). The gap is (arm - plain) / plain of the validation loss from the same seed, positive where the arm is worse.

Runs that the JSON already has are not run again; it is written after every run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.studies.demo_arms import gaps_to, parse, row_of, run_compiled, shown, train
from benchmarks.studies.demo_runs import Demo
from benchmarks.studies.formats import PLAIN, ROWS
from fp8compile.extras.demo.model import SIZES
from fp8compile.extras.demo.results import mean_of

SIZE = replace(SIZES["cpu"], layers=2, batch=4, length=128)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by seeds
ARMS = (PLAIN, *ROWS)


def run_arm(arm: str, seed: int, demo: Demo) -> dict[str, Any]:
    """One run, ready for JSON, with counts of what the report says was rewritten."""
    run, compiled = run_compiled(demo, seed, None if arm == PLAIN else ROWS[arm])
    row = row_of(run)
    if compiled is not None:
        report = fp8compile.report(compiled)
        row |= {"products": len(report.linears), "saved": len(report.saved)}
    return row


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By arm: the mean gap, its standard error, and half the width of its 95 % interval (Student's t)."""
    found: dict[str, Any] = {}
    for arm in runs:
        mean = mean_of(gaps_to(PLAIN, runs, arm)) if arm != PLAIN else None
        if mean is not None:
            half = mean.error * T_95[mean.n] if mean.error is not None and mean.n in T_95 else None
            found[arm] = {"gap": mean.mean, "error": mean.error, "half_95": half, "seeds": mean.n}
    return found


def table(found: Mapping[str, Any]) -> Table:
    """The gaps as people read them."""
    made = Table("arm", "seeds", "validation loss", "gap to plain", title=f"{found['training']['steps']} steps")
    for arm, rows in found["runs"].items():
        loss = statistics.fmean(row["validation_loss"] for row in rows.values())
        here = found["summary"].get(arm)
        error = f" ± {here['error']:.2%}" if here and here["error"] is not None else ""
        made.add_row(arm, str(len(rows)), f"{loss:.4f}", f"{here['gap']:+.2%}{error}" if here else "")
    return made


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    about = "Training with every format, against plain Inductor in BF16."
    arguments = parse(words, about, "format-training-cpu.json", ARMS, PLAIN, ";")
    return shown(train(arguments, True, run_arm, summary, size=SIZE, products=torch.bfloat16), table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
