"""The peak of a training step under a memory budget: ours, and that of PyTorch's own budget at the same fraction.

    python benchmarks/studies/bench_budget.py --json benchmarks/results/budget-cpu.json
    python benchmarks/studies/bench_budget.py --models bert vit --arms ours --json FILE    puts these cells into the file

Ours is ``Recipe.memory.budget`` without codes, PyTorch's ``torch._functorch.config.activation_memory_budget``; both through
Inductor, FP32, on a CPU, at 20 budgets from 1.0 to 0.05. The peak is the most bytes allocated at one time in forward and
backward, with the gradients of parameters, by torch.profiler. A budget that chooses the same state of the frontier as another
one is the same compiled code, and is measured once. The file is written after each cell, and what is in it is not measured
again: a run that was cut off goes on.

A fraction is of another thing in each: ours of the peak, PyTorch's of what is saved for backward. At 1.0 neither does
anything: both are plain Inductor.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.batches import Batch
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.measuring import call
from benchmarks.studies.models import MODELS, Case
from fp8compile.tools.step_memory import measured_peak

BUDGETS = tuple(i / 20 for i in range(20, 0, -1))
WIDTH, ROWS, LAYERS = 64, 512, 32  # of the deep model


class Gated(nn.Module):
    """A residual layer of silu(gate) * up: what pytorch issue 197838 stacks 32 times, without its norms and attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def deep() -> Case:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Gated(WIDTH) for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)
    about = f"{LAYERS} residual layers silu(gate) * up, hidden {WIDTH}, {ROWS} tokens"
    return Case(about, model, lambda number: Batch((x,)), lambda out, batch: out.square().mean())


CASES: dict[str, Callable[[], Case]] = {
    "32 layers": deep,
    **{name: (lambda name=name: MODELS[name](0)) for name in ("llama", "bert", "vit", "t5")},
}


def measured(case: Case, **options: Any) -> tuple[int, Any]:
    """The peak of a step of a compiled copy of the model, and what was compiled."""
    torch._dynamo.reset()
    model, batch = copy.deepcopy(case.model), case.batch(0)
    run = torch.compile(model, **options)

    def step() -> None:
        case.loss(call(run, batch, "fp32"), batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    return measured_peak(step), run


def at_budget(peaks: Sequence[int], budget: float) -> int:
    """Which state of a frontier a budget chooses."""
    within = [at for at, peak in enumerate(peaks) if peak <= int(budget * peaks[0])]
    return within[0] if within else peaks.index(min(peaks))


def ours(case: Case, found: dict[str, Any]) -> Iterator[None]:
    """Puts the measured peak at each budget into ``found``, and the frontier: saved bytes, predicted peak, microseconds."""
    cells = found.setdefault("ours", {})
    for budget in (str(b) for b in BUDGETS):
        if budget in cells:
            continue
        frontier = found.get("frontier", [])
        at = at_budget([peak for _, peak, _ in frontier], float(budget)) if frontier else None
        same = next((cell for b, cell in cells.items() if at == cell["state"] and b != "1.0"), None)
        if same is None:
            options = {"preset": "off", "memory": float(budget)}
            peak, run = measured(case, backend="fp8compile", options=options)
            at = 0
            for told in fp8compile.report(run).budgets:  # one: each model is one graph
                found["frontier"] = [[point.saved, point.peak, point.us] for point in told.frontier]
                at = told.chosen
            same = {"state": at, "peak": peak}
        cells[budget] = dict(same)
        yield


def pytorchs(case: Case, found: dict[str, Any]) -> Iterator[None]:
    """Puts the measured peak under PyTorch's own budget into ``found``."""
    cells = found.setdefault("pytorch", {})
    for budget in BUDGETS:
        if str(budget) not in cells:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                cells[str(budget)] = measured(case)[0]
            yield


ARMS: dict[str, Callable[[Case, dict[str, Any]], Iterator[None]]] = {"ours": ours, "pytorch": pytorchs}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    there = arguments.json and arguments.json.exists()
    models: dict[str, Any] = json.loads(arguments.json.read_text())["models"] if there else {}
    for name in arguments.models:
        case, found = CASES[name](), models.setdefault(name, {})
        found["about"] = case.about
        found["gradients"] = sum(p.numel() * p.element_size() for p in case.model.parameters() if p.requires_grad)
        for arm in arguments.arms:
            for _ in ARMS[arm](case, found):
                print(name, arm, *list(found[arm].items())[-1], flush=True)
                if arguments.json:
                    write_json(arguments.json, {**environment(), "models": models})
    return {**environment(), "models": models}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
