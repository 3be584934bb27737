"""The demo trained with FP8 linears in every mode of scaling, beside plain Inductor: validation loss after 300 steps.

    python benchmarks/studies/bench_mode_training.py --seeds 3
    python benchmarks/studies/bench_mode_training.py --seeds 5 --arms "plain;dynamic;delayed"

Every arm sees the same initial weights, batches, rates and clipping (``demo_runs``); products FP32, codes emulated. The gap
is (arm - plain) / plain of the validation loss from the same seed, positive where the arm is worse; mean +- standard error
over seeds.

Runs that the JSON already has are not run again; it is written after every run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.studies.demo_arms import gaps_to, parse, row_of, run_compiled, shown, train
from benchmarks.studies.demo_runs import Demo
from fp8compile.extras.demo.results import mean_of

REFERENCE = "plain"
ALONE = {"linears": "tensorwise", "saved": "off", "linears.emulate": True}
E4M3 = {"linears.formats": "e4m3"}
DELAYED = {"linears.scaling": "delayed"}
MERGED = {**DELAYED, "linears.cache_weights": True, "linears.merge_dgrads": True}
ARMS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {},
    "dynamic": ALONE,
    "delayed": {**ALONE, **DELAYED},
    "delayed, cached, merged": {**ALONE, **MERGED},
    "dynamic, e4m3": {**ALONE, **E4M3},
    "delayed, e4m3": {**ALONE, **DELAYED, **E4M3},
    "rowwise": {**ALONE, "linears": "rowwise"},
    "blockwise, e4m3": {**ALONE, "linears": "blockwise", **E4M3},
    "mxfp8, e4m3": {**ALONE, "linears": "mxfp8", **E4M3},
    "int8": {**ALONE, "linears": "int8"},
}


def run_arm(arm: str, seed: int, demo: Demo) -> dict[str, Any]:
    """One run, ready for JSON. What the report says of its linears is beside the losses."""
    run, compiled = run_compiled(demo, seed, None if arm == REFERENCE else ARMS[arm])
    row = row_of(run)
    if compiled is not None:
        row["matmuls_in_fp8"] = len(fp8compile.report(compiled).linears)
        histories = [history for _, history in fp8compile.tools.scaling_state(compiled).graphs]
        row["fell_back"] = sum(int(history.totals[:, 2].sum()) for history in histories)
    return row


def gaps(runs: Mapping[str, Mapping[str, Any]], arm: str) -> list[float]:
    """The arm's gap to the reference for each seed that both finished."""
    return gaps_to(REFERENCE, runs, arm)


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean gap and its standard error for each arm."""
    means = {arm: mean_of(gaps(runs, arm)) for arm in runs if arm != REFERENCE}
    return {arm: {"gap": m.mean, "error": m.error, "seeds": m.n} for arm, m in means.items() if m is not None}


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
    about = "Training with FP8 linears in every mode, against plain Inductor."
    arguments = parse(words, about, "mode-training-cpu.json", tuple(ARMS), REFERENCE, ";")
    return shown(train(arguments, True, run_arm, summary), table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
