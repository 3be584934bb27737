"""What set-ups as people have them keep for the backward, what codes cost their gradients, and the peak of a step.

    python -m benchmarks.studies.bench_setups [--json FILE] [--only WORD ...] [--peaks]

    kept     bytes that the graphs save, over what plain Inductor's cut saves
    goal     the share that was aimed at
    dB       SQNR of the worst gradient of a parameter against float64, of the model itself uncompiled, then of ours (storage,
             no FP8 linears); none where a step draws random numbers
    peaks    the most bytes alive in a step beyond what it starts with: plain Inductor's, then ours, in generated code

"an opaque attention kernel" is declared smooth in q, k and v, as a user would.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.setups import OPAQUE, SETUPS, SetUp, gradients, in_float64, least, made
from fp8compile.numerics.metrics import sqnr
from fp8compile.tools.step_memory import measured_peak

NAME = "setups-cpu.json"
RESULTS = Path(__file__).resolve().parents[1] / "results"
LEAST = 1e-6  # of the largest gradient's norm: smaller ones are roundings


def row(setup: SetUp, with_peaks: bool) -> dict[str, Any]:
    """The figures of one set-up."""
    torch._dynamo.reset()
    model = made(setup)
    compiled = torch.compile(
        model, backend="fp8compile", options={"debug.codegen": "eager", "linears": "off", **setup.options}
    )
    ours = gradients(setup, model, compiled)
    report = fp8compile.report(compiled)
    found: dict[str, Any] = {
        "kept": report.saved_bytes,
        "plain": report.saved_bytes_plain,
        "goal": setup.goal,
        "by": {part.label: part.nbytes for part in report.waterfall.parts},
    }
    if not setup.is_random:
        found |= _errors(setup, ours)
    return found | (_peaks(setup) if with_peaks else {})


def _errors(setup: SetUp, ours: dict[str, torch.Tensor]) -> dict[str, float]:
    """The worst gradients of the model as it is, and of ours."""
    reference, twin = gradients(setup, in_float64(setup)), gradients(setup, made(setup))
    most = max(float(g.norm()) for g in reference.values())
    names = [name for name, g in reference.items() if float(g.norm()) > LEAST * most]
    return {
        whose: least({name: sqnr(reference[name], found[name]) for name in names})
        for whose, found in (("twin_db", twin), ("ours_db", ours))
    }


def _peaks(setup: SetUp) -> dict[str, int]:
    """The peak of a step in generated code, of both."""
    found = {}
    for whose, options in (("peak_plain", None), ("peak_ours", dict(setup.options))):
        torch._dynamo.reset()
        model = made(setup)
        how: dict[str, Any] = {} if options is None else {"backend": "fp8compile", "options": options}
        compiled = torch.compile(model, **how)
        for _ in range(2):
            setup.loss(compiled).backward()
        found[whose] = measured_peak(partial(_step, setup, compiled))
    return found


def _step(setup: SetUp, compiled: Callable[..., Any]) -> None:
    setup.loss(compiled).backward()


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """As people read it."""
    shown = Table("set-up", "kept", "goal", "dB, as it is", "dB, ours")
    for name, here in rows.items():
        db = [f"{here[key]:.1f}" if key in here else "" for key in ("twin_db", "ours_db")]
        shown.add_row(name, f"{here['kept'] / here['plain']:.1%}", f"{here['goal']:.0%}", *db)
    return shown


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--peaks", action="store_true")
    arguments = parser.parse_args(words)
    fp8compile.declare("fp8compile_setups::attention_backward", smooth=("q", "k", "v"))
    rows: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, setup in SETUPS.items():
        if not arguments.only or any(word in name for word in arguments.only):
            rows[name] = row(setup, arguments.peaks)
            found = {**environment(), "declared": [OPAQUE], "rows": rows}
            if arguments.json:
                write_json(arguments.json, found)
    Console(width=120).print(table(rows))
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main()
