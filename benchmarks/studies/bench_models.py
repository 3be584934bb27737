"""Bytes kept, gradient quality and training of ten models, against eager PyTorch and plain Inductor.

    python benchmarks/studies/bench_models.py --json benchmarks/results/models-cpu.json

For every model and precision:
  bytes     what one forward leaves for the backward: distinct storages that reach torch.autograd's
            saved-tensor hooks, without parameters, buffers and the model's inputs. Eager, plain Inductor,
            ours; beside it what ``fp8compile.report`` says of the same compilation.
  SQNR      20 log10(|ref| / |ref - x|) of every parameter's gradient against float64, after some warm-up
            steps (a network at initialisation has gradients that are zero by construction). "plain" is
            Inductor without us: the noise floor.
  training  the same batches, seeds and AdamW for every arm; the gap to the twin (plain) is that of the
            mean loss of the last five steps, relative, positive where an arm is worse; mean over seeds +-
            standard error. The arm "eager" is PyTorch itself: its gap is what rounding alone does.
  linears   (arms "linears" and "linears-e4m3": FP8 linears emulated, with storage as in "auto") every product
            in FP8 or left with its reason, beside the linears that run in the model, by module path.

``--codegen eager`` runs the rewritten graphs node by node: the same graphs, the same bytes, no C++ compiler.
The JSON is written after every model; models and precisions that are not run keep what it says of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.workarounds import bf16_products_in_fp32
from benchmarks.studies.measuring import (
    FORMATS,
    LEARNING_RATE,
    LINEARS,
    WARM_UP_STEPS,
    Measured,
    Way,
    build,
    measure,
    train_seed,
    warm_up,
)
from benchmarks.studies.models import MODELS, Case
from benchmarks.studies.rows import measured_row, training_row
from benchmarks.studies.tables import tables

ARMS = ("eager", *FORMATS, *LINEARS)
PRECISIONS = ("amp", "bf16", "fp32")

# ------------------------------------------------------------------------------------------------------ rows


def row_of(name: str, arguments: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Everything about one model, ready for JSON; what is not measured now stays as it was ``before``."""
    case = MODELS[name](0)
    row: dict[str, Any] = {
        "about": case.about,
        "codegen": arguments.codegen,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "warm_up_steps": WARM_UP_STEPS,
        "precisions": before.get("precisions", {}),
        "training": before.get("training"),
    }
    warm_up(case)
    for index, precision in enumerate(arguments.precisions):
        seeds = 0 if index else arguments.seeds
        found, losses = _one_precision(name, case, precision, arguments, seeds)
        row["precisions"][precision] = {**found, **environment()}
        if losses:
            row["training"] = {**training_row(losses, precision, arguments), **environment()}
    return row


def _ways(arms: Sequence[str]) -> list[str]:
    """What is measured: both baselines, every storage format if one is asked for, and the FP8 linears asked for."""
    storage = FORMATS if set(arms) & set(FORMATS) else ()
    return ["plain", "eager", *storage, *(way for way in LINEARS if way in arms)]


def _one_precision(
    name: str,
    case: Case,
    precision: str,
    arguments: argparse.Namespace,
    seeds: int,
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Every way of compiling in turn: measured, then trained; and the losses of those that are trained."""
    measured: dict[str, Measured] = {}
    losses: dict[str, list[list[float]]] = {}
    for way in _ways(arguments.arms):
        started = time.perf_counter()
        built = build(case, Way(way, arguments.codegen), precision)
        measured[way] = measure(case, built)
        if arguments.reports and measured[way].report is not None:
            _write_report(arguments.reports, f"{name}-{precision}-{way}-{arguments.codegen}", measured[way])
        _say(f"{name} {precision} {way}: measured in {time.perf_counter() - started:.0f} s")
        twin_elsewhere = way == "plain" and arguments.twin not in (None, arguments.codegen)
        if seeds and way in ("plain", *arguments.arms):
            if twin_elsewhere:
                built = build(case, Way("plain", arguments.twin), precision)
            steps, rate = arguments.steps, arguments.learning_rate
            losses[way] = [train_seed(name, case, built, steps, seed, rate) for seed in range(seeds)]
            _say(f"{name} {precision} {way}: trained after {time.perf_counter() - started:.0f} s")
    return measured_row(case, precision, measured), losses


# --------------------------------------------------------------------------------------------------- writing


def _write_report(folder: Path, name: str, ours: Measured) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = "\n".join(f"{k.nbytes:10d} {k.dtype:14s} {list(k.shape)}" for k in ours.kept)
    (folder / f"{name}.txt").write_text(f"{ours.report}\n\nmeasured storages\n{kept}\n")
    if ours.report is not None:
        (folder / f"{name}.json").write_text(ours.report.to_json())


def write(path: Path, rows: dict[str, Any]) -> None:
    """Write the rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- command line


def _words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(allowed)}")
        return words

    return parse


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes, gradient SQNR and training of the model sweep.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--models", type=_words(list(MODELS)), default=list(MODELS), help="comma-separated")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--twin", choices=("eager", "inductor"), help="codegen of the twin (as --codegen)")
    precisions = "comma-separated; training runs in the first"
    parser.add_argument("--precisions", type=_words(PRECISIONS), default=["amp"], help=precisions)
    parser.add_argument("--arms", type=_words(ARMS), default=["eager", "auto"], help="trained beside the twin")
    parser.add_argument("--seeds", type=int, default=3, help="0: no training")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--learning-rate", type=float, default=LEARNING_RATE, help="lower where rounding is amplified"
    )
    parser.add_argument("--reports", type=Path, help="a folder for the whole reports, as text and JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
    bf16_products_in_fp32()
    rows: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in arguments.models:
        key = f"{name}/{arguments.codegen}"
        rows[key] = row_of(name, arguments, rows.get(key, {}))
        write(arguments.json, rows)
    console = Console(width=200) if not sys.stdout.isatty() else Console()
    for table in tables(rows):
        console.print(table, "")


if __name__ == "__main__":
    main()
