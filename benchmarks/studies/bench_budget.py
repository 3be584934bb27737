"""The peak of a training step under a memory budget: ours, and that of PyTorch's own budget at the same fraction.

    python benchmarks/studies/bench_budget.py --json benchmarks/results/budget-cpu.json
    python benchmarks/studies/bench_budget.py --models bert vit --json FILE    puts these models' rows into the file

Ours is ``Recipe.memory_budget`` without codes, PyTorch's ``torch._functorch.config.activation_memory_budget``; both through
Inductor, FP32, on a CPU. The peak is the most bytes allocated at one time in forward and backward, with the gradients of
parameters, by torch.profiler. Predicted peaks are those of 20 budgets, by the walk over the graphs, without the gradients.

A fraction is of another thing in each: ours of the peak, PyTorch's of what is saved for backward.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.studies.measuring import call
from benchmarks.studies.models import MODELS, Case, llama_of
from fp8compile.reporting.budget import Budget

MEASURED = (0.5, 0.3, 0.2, 0.15, 0.1, 0.05)  # the last five: those of pytorch issue 197838
PREDICTED = tuple(i / 20 for i in range(20, 0, -1))
CASES: dict[str, Callable[[], Case]] = {
    "32 layers": lambda: llama_of(0, width=64, layers=32, rows=1, length=256),
    **{name: (lambda name=name: MODELS[name](0)) for name in ("llama", "bert", "vit", "t5")},
}


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes that a CPU has allocated at one time during ``step``, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def measured(case: Case, **options: Any) -> tuple[int, Any]:
    """The peak of a step of a compiled copy of the model, and what was compiled."""
    torch._dynamo.reset()
    model, batch = copy.deepcopy(case.model), case.batch(0)
    run = torch.compile(model, **options)

    def step() -> None:
        case.loss(call(run, batch, "fp32"), batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    return peak_bytes(step), run


def ours(case: Case) -> dict[str, Any]:
    """Predicted peaks of all budgets, and measured ones: once for each state of the frontier that one of them chooses."""
    rows, by_state, told = {}, dict[int, int](), None
    for budget in MEASURED:
        if told is None or at_budget(told, budget) not in by_state:
            options = {"preset": "off", "memory_budget": budget}
            peak, run = measured(case, backend="fp8compile", options=options)
            (told,) = fp8compile.report(run).budgets
            by_state[told.chosen] = peak
        at = at_budget(told, budget)
        point = told.frontier[at]
        rows[str(budget)] = {"peak": by_state[at], "predicted": point.peak, "us": point.us}
    assert told is not None
    return {
        "measured": rows,
        "predicted": {str(b): told.frontier[at_budget(told, b)].peak for b in PREDICTED},
    }


def at_budget(told: Budget, budget: float) -> int:
    """Which state of a frontier a budget chooses."""
    peaks = [point.peak for point in told.frontier]
    within = [at for at, peak in enumerate(peaks) if peak <= int(budget * peaks[0])]
    return within[0] if within else peaks.index(min(peaks))


def pytorchs(case: Case) -> dict[str, int]:
    """Measured peaks of PyTorch's own budget."""
    rows = {}
    for budget in MEASURED:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            rows[str(budget)] = measured(case)[0]
    return rows


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    models: dict[str, Any] = {}
    for name in arguments.models:
        case = CASES[name]()
        gradients = sum(p.numel() * p.element_size() for p in case.model.parameters() if p.requires_grad)
        models[name] = {"about": case.about, "gradients": gradients, "ours": ours(case), "pytorch": pytorchs(case)}
        print(name, json.dumps(models[name]), flush=True)
        if arguments.json:
            before = json.loads(arguments.json.read_text())["models"] if arguments.json.exists() else {}
            found = {**environment(), "models": {**before, **models}}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return {**environment(), "models": models}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
