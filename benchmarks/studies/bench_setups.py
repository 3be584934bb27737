"""What set-ups as people have them keep for the backward, what codes cost their gradients, and the peak of a step.

    python -m benchmarks.studies.bench_setups [--json FILE] [--only WORD ...] [--peaks]

    kept     bytes that the graphs save, over what plain Inductor's cut saves
    goal     the share that was aimed at
    dB       SQNR of the worst gradient of a parameter against float64: of the model itself uncompiled, of ours with storage
             alone, and with all linears in FP8 too (emulated); all with eager's random numbers
    peaks    the most bytes alive in a step beyond what it starts with: plain Inductor's, then ours, in generated code

"an opaque attention kernel" is declared smooth in q, k and v, as a user would.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.setups import OPAQUE, SETUPS, SetUp, gradients, in_float64, least, made
from fp8compile.numerics.metrics import sqnr
from fp8compile.tools.step_memory import measured_peak

NAME = "setups-cpu.json"
NEEDED = ("transformers", "peft")
RESULTS = Path(__file__).resolve().parents[1] / "results"
OURS: Mapping[str, Mapping[str, Any]] = {
    "ours_db": {"linears": "off"},
    "fp8_db": {"linears": {"mode": "tensorwise", "emulate": True}},
}
EAGERS_RANDOM_NUMBERS = {"debug.inductor": {"fallback_random": True}}
LEAST = 1e-6  # of the largest gradient's norm: smaller ones are roundings


def row(setup: SetUp, with_peaks: bool) -> dict[str, Any]:
    """The figures of one set-up."""
    torch._dynamo.reset()
    compiled = _compiled(setup, made(setup), {"linears": "off"})
    setup.loss(compiled).backward()
    report = fp8compile.report(compiled)
    found: dict[str, Any] = {
        "kept": report.saved_bytes,
        "plain": report.saved_bytes_plain,
        "goal": setup.goal,
        "by": {part.label: part.nbytes for part in report.waterfall.parts},
    }
    return found | _errors(setup) | (_peaks(setup) if with_peaks else {})


def _compiled(setup: SetUp, model: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    options = {"debug.codegen": "eager", **setup.options, **options}
    return torch.compile(model, backend="fp8compile", options=options)  # type: ignore[no-any-return]


def _errors(setup: SetUp) -> dict[str, float]:
    """The worst gradients of the model as it is, and of ours, against float64's."""
    arms = {"twin_db": gradients(setup, made(setup))}
    for whose, options in OURS.items():
        torch._dynamo.reset()
        model = made(setup)
        arms[whose] = gradients(setup, model, _compiled(setup, model, {**EAGERS_RANDOM_NUMBERS, **options}))
    reference = gradients(setup, in_float64(setup))
    most = max(float(g.norm()) for g in reference.values())
    names = [name for name, g in reference.items() if float(g.norm()) > LEAST * most]
    return {
        whose: least({name: sqnr(reference[name], found[name]) for name in names}) for whose, found in arms.items()
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
    shown = Table("set-up", "kept", "goal", "dB, as it is", "storage", "and FP8")
    for name, here in rows.items():
        db = [f"{here[key]:.1f}" for key in ("twin_db", *OURS)]
        shown.add_row(name, f"{here['kept'] / here['plain']:.1%}", f"{here['goal']:.0%}", *db)
    return shown


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--peaks", action="store_true")
    arguments = parser.parse_args(words)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(
            f"{' and '.join(missing)} not found: pip install {' '.join(missing)}, or use the environment of make test"
        )
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
