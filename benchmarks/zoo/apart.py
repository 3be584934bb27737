"""Every exception of the zoo, taken apart: which part of fp8compile makes it. The figures are added to its row.

    python benchmarks/zoo/apart.py --json benchmarks/results/zoo-cpu.json
    python benchmarks/zoo/apart.py --json ... --only clip     exceptions whose name holds the word
    python benchmarks/zoo/apart.py --json ... --again         those that are taken apart already, too

The arms, on the weights and batches of ``measured.row_of``:
twin      eager PyTorch under BF16 autocast
off       preset "off": captured and run, nothing encoded
storage   {"linears": "off"}: tensors stored as codes, linears in BF16
linears   FP8 linears by force, emulated; tensors stored as they are
ours      both: the default recipe, emulated
mended    ours with the changes that ``causes.MENDS`` has for the model, where it has some

db        of each gradient below the bar (up to eight), or of the worst: SQNR against float64, on batches 0 ... 4. The first
          is the batch that the verdict is of. The others say whether it holds for the model or for that batch.
size      of the same gradient, exact, batch by batch: its RMS over that of the parameter in the middle. A gradient that is
          tiny beside the others is what is left of a sum that cancels.
gap       where the loss is what was found: of every arm over ``SEEDS`` seeds, with its mean's standard error

A row that ``run.py`` measures anew loses its figures, and is taken apart again.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.harness.results import finite
from benchmarks.harness.workarounds import mend_torchvision
from benchmarks.studies.measuring import Built, Way, build, call, gradients, warm_up
from benchmarks.studies.models import Case
from benchmarks.zoo import page
from benchmarks.zoo.causes import MENDS
from benchmarks.zoo.measured import PRECISION, gap, run_of
from benchmarks.zoo.registry import ZooModel, models
from benchmarks.zoo.run import alone, quietly, stamp, write
from fp8compile.numerics.metrics import sqnr

BATCHES = range(5)
SEEDS = 5
LIMIT = 1200  # seconds for a model
Row = dict[str, Any]
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Arm(Way):
    """A way of compiling by its options."""

    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.changes)


def arms(name: str) -> dict[str, Way]:
    """The arms of a model, by name; the twin first."""
    options: dict[str, dict[str, Any]] = {
        "off": {"preset": "off"},
        "storage": {"linears": "off"},
        "linears": {"linears": "tensorwise", "saved": "off", "linears.emulate": True},
        "ours": {"linears.emulate": True},
    }
    if name in MENDS:
        options["mended"] = {"linears.emulate": True, **MENDS[name]}
    own = {arm: Arm(arm, "eager", tuple(found.items())) for arm, found in options.items()}
    return {"twin": Way("eager", "eager"), **own}


def apart(model: ZooModel, row: Mapping[str, Any]) -> Row:
    """What a row of an exception is to have besides."""
    case = model.case(0)
    warm_up(case)
    wanted = list(row["db"]["ours"]["below_bar"]) or [row["db"]["ours"]["worst_parameter"]]
    exact = exact_gradients(case)
    found: dict[str, list[Gradients]] = {}
    losses: dict[str, list[list[float]]] = {}
    for arm, way in arms(model.name).items():
        built = build(case, way, PRECISION)
        found[arm] = gradients_of(case, built, wanted)
        if not page.is_close(row):
            losses[arm] = [run_of(model, built, seed, row["steps"]) for seed in range(SEEDS)]
    parameters = {name: figures(name, exact, found) for name in wanted}
    return {
        "parameters": parameters,
        "gap": gaps(losses),
        "mend": {k: str(v) for k, v in MENDS.get(model.name, {}).items()},
    }


# --------------------------------------------------------------------------------------------------- gradients


def exact_gradients(case: Case) -> list[Gradients]:
    """In float64 and eager, all of them, batch by batch."""
    exact = copy.deepcopy(case.model).double()
    batches = [case.batch(number).to(torch.float64) for number in BATCHES]
    return [gradients(exact, lambda b=batch: case.loss(call(exact, b, "fp64"), b)) for batch in batches]  # type: ignore[misc]


def gradients_of(case: Case, built: Built, wanted: Sequence[str]) -> list[Gradients]:
    """Those of an arm, batch by batch."""
    found = []
    for batch in map(case.batch, BATCHES):
        every = gradients(built.model, lambda b=batch: case.loss(call(built.run, b, PRECISION), b))  # type: ignore[misc]
        found.append({name: every[name] for name in wanted})
    return found


def figures(name: str, exact: Sequence[Gradients], found: Mapping[str, Sequence[Gradients]]) -> Row:
    """One parameter: dB of every arm, and the gradient's size."""
    db = {arm: [sqnr(e[name], g[name]) for e, g in zip(exact, each, strict=True)] for arm, each in found.items()}
    return {"db": db, "size": [size(name, each) for each in exact]}


def size(name: str, exact: Gradients) -> float:
    """A gradient's RMS over the RMS of the parameter in the middle."""
    rms = {each: float(g.square().mean().sqrt()) for each, g in exact.items()}
    return rms[name] / sorted(rms.values())[len(rms) // 2]


# -------------------------------------------------------------------------------------------------------- gaps


def gaps(losses: Mapping[str, Sequence[Sequence[float]]]) -> Row:
    """Of every arm but the twin: the gap of each seed, their mean and its standard error."""
    found = {
        arm: [gap(a, b) for a, b in zip(runs, losses["twin"], strict=True)]
        for arm, runs in losses.items()
        if arm != "twin"
    }
    return {
        arm: {"mean": statistics.fmean(each), "error": statistics.stdev(each) / len(each) ** 0.5, "each": each}
        for arm, each in found.items()
    }


# ------------------------------------------------------------------------------------------------ command line


def measure(answer: Connection, model: ZooModel, arguments: argparse.Namespace) -> None:
    """In a process of its own."""
    quietly()
    row = json.loads(arguments.json.read_text())["rows"][model.name]
    with model.settings():
        answer.send({**finite(apart(model, row)), "errors": {}})


def due(rows: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    """The exceptions to take apart, as the arguments say."""
    found = [name for name, row in rows.items() if page.findings(row) and not row["errors"]]
    found = [name for name in found if not arguments.only or any(word in name for word in arguments.only)]
    return [name for name in found if arguments.again or "apart" not in rows[name]]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The exceptions of the zoo, taken apart.")
    parser.add_argument("--json", type=Path, required=True, help="the results file, read and added to")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts of names")
    parser.add_argument("--again", action="store_true", help="those that are taken apart already, too")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for a model")
    arguments = parser.parse_args(words)
    mend_torchvision()
    zoo, failed = models(), False
    for name in due(json.loads(arguments.json.read_text())["rows"], arguments):
        found = alone(zoo[name], arguments, measure)
        document = json.loads(arguments.json.read_text())  # read again: another run may have added to it
        document["rows"][name]["apart"] = {**found, "measured": stamp(zoo[name])}
        write(arguments.json, document)
        print(f"{name}: {found['errors'] or line(found)}", flush=True)
        failed |= bool(found["errors"])
    return int(failed)


def line(found: Row) -> str:
    """What was found, in a line: the gaps of each arm, and the dB of the first parameter on the first batch."""
    gaps = ", ".join(f"{arm} {each['mean']:+.2%}" for arm, each in found["gap"].items())
    name, first = next(iter(found["parameters"].items()))
    return f"{gaps}{'; ' if gaps else ''}{name} " + ", ".join(f"{arm} {db[0]:.1f}" for arm, db in first["db"].items())


if __name__ == "__main__":
    sys.exit(main())
