"""The peak that ``fits`` tells against the allocator's, for ten models on a CPU. Prints a line each, writes JSON.

``python benchmarks/studies/bench_fits.py --json benchmarks/results/fits-cpu.json``; needs transformers and timm. A step is
forward and backward that begin without gradients; the loss is computed outside the model, as a training loop does.

Three figures of each model, in bytes:

    explained    ``fp8compile.explain``: an estimate from the graph, no code is generated
    generated    ``fp8compile.report`` of the model that runs: off its code
    measured     what PyTorch's allocator has given at one time beyond what was there
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.measuring import call
from benchmarks.studies.models import MODELS, Case
from fp8compile.reporting.running import most_running
from fp8compile.tools.step_memory import measured_peak

OPTIONS = {
    "linears": "off"
}  # emulated, linears would decode their operands in memory, which no device does that has FP8


def row(case: Case) -> dict[str, Any]:
    """The three figures of a model, and whether it has convolutions."""
    torch._dynamo.reset()
    model, batch = copy.deepcopy(case.model), case.batch(0)
    run = torch.compile(model, backend="fp8compile", options=OPTIONS)

    def step() -> None:
        case.loss(call(run, batch, "fp32"), batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = measured_peak(step)
    report = fp8compile.report(run)
    fit = report.fits()
    assert fit.is_generated, "compiled by Inductor a line above"
    estimate = [(graph.peaks, graph.saved_bytes) for graph in report.graphs for _ in range(graph.runs)]
    return {
        "explained": most_running(estimate, fit.gradients),
        "generated": fit.running,
        "measured": measured,
        "convolutions": sum(
            isinstance(m, (torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d)) for m in model.modules()
        ),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="The peak that fits tells, against the allocator's.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args(words)
    path = arguments.json
    before = json.loads(path.read_text()) if path and path.exists() else {"models": {}}
    found = {**before, **environment()}
    for name in arguments.models:
        found["models"][name] = each = row(MODELS[name](0))
        print(f"{name}: {each} generated/measured {each['generated'] / each['measured']:.4f}", flush=True)
        if path:
            write_json(path, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
