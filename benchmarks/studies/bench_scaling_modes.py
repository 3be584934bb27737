"""Gradients and outputs of FP8 linears in every mode of scaling, in dB against float64: Llama, BERT and ViT layers.

    python benchmarks/studies/bench_scaling_modes.py --json benchmarks/results/scaling-modes-cpu.json

FP8 linears alone (nothing is stored as codes), emulated, rewritten graphs run node by node, FP32 model, after some steps of
training. SQNR of every parameter's gradient, worst and median, and of the logits. Once as trained, once with two channels of
every norm's output made 20 times as large, as trained language models have them. Delayed scales come from other batches.

What the JSON already has of a model is not run again; it is written after every model.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.batches import Batch
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.measuring import (
    BATCHES_BEFORE,
    call,
    gradients,
    quality,
    reference_gradients,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.studies.models import TRANSFORMERS, Case
from fp8compile.numerics.metrics import sqnr
from fp8compile.reporting.entries import LINEAR

E4M3 = {"linears.formats": "e4m3"}
TENSORWISE: Mapping[str, Any] = {"linears": "tensorwise"}
MODES: Mapping[str, Mapping[str, Any]] = {
    "tensorwise, hybrid": TENSORWISE,
    "tensorwise, e4m3": {**TENSORWISE, **E4M3},
    "tensorwise, dgrad e4m3, wgrad e5m2": {**TENSORWISE, "linears.formats": {"dgrad": "e4m3", "wgrad": "e5m2"}},
    "delayed, hybrid": {**TENSORWISE, "linears.scaling": "delayed"},
    "delayed, e4m3": {**TENSORWISE, "linears.scaling": "delayed", **E4M3},
    "rowwise, hybrid": {"linears": "rowwise"},
    "rowwise, e4m3": {"linears": "rowwise", **E4M3},
    "blockwise, hybrid": {"linears": "blockwise"},
    "blockwise, e4m3": {"linears": "blockwise", **E4M3},
    "mxfp8, hybrid": {"linears": "mxfp8"},
    "mxfp8, e4m3": {"linears": "mxfp8", **E4M3},
    "int8": {"linears": "int8"},
}
LAYERS = ("llama", "bert", "vit")
CHANNELS, FACTOR = (3, 50), 20.0
AS_TRAINED, OUTLIERS = "as trained", "two channels 20 times as large"


@torch.no_grad()
def with_outliers(case: Case) -> Case:
    """A copy whose norms make two channels large."""
    model = copy.deepcopy(case.model)
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            module.get_parameter("weight")[list(CHANNELS)] *= FACTOR
    return dataclasses.replace(case, model=model)


def of_modes(case: Case, modes: Sequence[str] = tuple(MODES)) -> dict[str, Any]:
    """By mode: SQNR of gradients and of the logits, and the formats of the matmuls with how many have them."""
    reference, batch = reference_gradients(case), case.batch(0)
    exact = logits(copy.deepcopy(case.model).double(), batch.to(torch.float64))
    zero = zero_up_to_rounding(reference)
    found: dict[str, Any] = {}
    for mode in modes:
        torch._dynamo.reset()
        run = compiled(case, mode)
        got = gradients(run, lambda run=run: case.loss(call(run, batch, "fp32"), batch))  # type: ignore[misc]
        summary = quality(reference, {name.removeprefix("_orig_mod."): g for name, g in got.items()}, zero).summary()
        found[mode] = {**summary, "output_db": sqnr(exact, logits(run, batch)), "matmuls": matmuls(run)}
    return found


def compiled(case: Case, mode: str) -> nn.Module:
    """A copy of the case's model in this mode; where scales are delayed, after other batches."""
    options = {
        "linears": "tensorwise",
        "saved": "off",
        "linears.emulate": True,
        "debug.codegen": "eager",
        **MODES[mode],
    }
    run = torch.compile(copy.deepcopy(case.model), backend="fp8compile", options=options)
    assert isinstance(run, nn.Module)
    if "linears.scaling" in options:
        for before in map(case.batch, BATCHES_BEFORE):
            case.loss(call(run, before, "fp32"), before).backward()  # type: ignore[no-untyped-call]
    return run


def logits(run: nn.Module, batch: Batch) -> Tensor:
    """What the model says of a batch, in training mode."""
    output = call(run, batch, "fp32")
    found = output.logits if hasattr(output, "logits") else output
    assert isinstance(found, Tensor)
    return found.detach()


def matmuls(run: nn.Module) -> dict[str, int]:
    """How many matmuls of linears have which formats; those that are left by their reason."""
    report = fp8compile.report(run)
    told = [*(x.formats for x in report.linears), *(f"left: {x.reason}" for x in report.notes.skipped(LINEAR))]
    return {text: told.count(text) for text in sorted(set(told))}


KINDS: Mapping[str, Callable[[Case], Case]] = {AS_TRAINED: lambda case: case, OUTLIERS: with_outliers}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Gradient and output SQNR of every mode of scaling.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the machinery")
    arguments = parser.parse_args(words)
    found = {**environment(), "channels": CHANNELS, "factor": FACTOR}
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    found["models"] = before.get("models", {})
    for name in LAYERS:
        for kind, row in _missing(name, arguments.tiny, found["models"].setdefault(name, {})):
            found["models"][name][kind] = {**found["models"][name].get(kind, {}), **row}
            _say(name, kind, row)
            if arguments.json:
                write_json(arguments.json, found)
    return found


def _missing(name: str, tiny: bool, had: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kinds of which a model lacks modes, with their rows."""
    lacking = {kind: [mode for mode in MODES if mode not in had.get(kind, {})] for kind in KINDS}
    if not any(lacking.values()):
        return
    case = TRANSFORMERS[name](0, tiny=tiny)
    had["about"] = case.about
    warm_up(case)
    for kind, changed in KINDS.items():
        if lacking[kind]:
            yield kind, of_modes(changed(case), lacking[kind])


def _say(name: str, kind: str, by_mode: Mapping[str, Any]) -> None:
    for mode, row in by_mode.items():
        gradient = f"worst {row['worst_db']:.1f} ({row['worst_parameter']}), median {row['median_db']:.1f}"
        print(f"{name}, {kind}, {mode}: gradients {gradient}, output {row['output_db']:.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
