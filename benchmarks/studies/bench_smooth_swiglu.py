"""What ``linears.smooth_swiglu`` is worth: the demo's Llama after 300 steps, two channels of silu(gate) * up made large.

    python benchmarks/studies/bench_smooth_swiglu.py --json benchmarks/results/smooth-swiglu-cpu.json

In every layer two rows of up_proj are multiplied by a factor; "balanced" divides their columns of down_proj by it, so that
the model computes what it did. Only down_proj is in FP8, emulated, node by node: rows of up_proj's weight lie as far apart,
which is another matter. SQNR against float64 of the logits, and of the gradients by channel, since an optimizer that divides
each gradient by its own size (Adam) sees small channels as it sees large ones: columns of down_proj (its wgrad), rows of
gate_proj and up_proj (what its dgrad leads to). Median, and the worst of 99 in 100.

"delayed, a jump" has scales of steps before the channels were made large.

What the JSON already has is not run again; it is written after every factor.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.studies.bench_mode_training import adamw
from benchmarks.studies.demo_runs import CPU, Demo
from fp8compile.extras.demo.data import train_batches
from fp8compile.extras.demo.model import SIZES, build_model
from fp8compile.numerics.metrics import sqnr

CHANNELS = (5, 77)
FACTORS = (1, 20, 100, 1_000, 10_000, 100_000)
NOT_BALANCED = (1_000, 100)
WORST = 0.01  # of all channels
JUMP, STEPS_BEFORE = "delayed, a jump", 3
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "dynamic": {},
    "dynamic, smooth": {"linears.smooth_swiglu": True},
    JUMP: {"linears.scaling": "delayed"},
    "rowwise": {"linears": "rowwise"},
}


def options(mode: str) -> dict[str, Any]:
    """Only down_proj is in FP8."""
    down = {"linears": "tensorwise", **FIELDS[mode]}
    return {
        "linears": "off",
        "saved": "off",
        "linears.emulate": True,
        "debug.codegen": "eager",
        "modules": {"*.down_proj": down},
    }


@torch.no_grad()
def make_large(model: nn.Module, factor: float, balanced: bool) -> None:
    """Make two channels of every silu(gate) * up this much larger, in place."""
    for name, weight in model.named_parameters():
        if name.endswith("up_proj.weight"):
            weight[list(CHANNELS)] *= factor
        elif name.endswith("down_proj.weight") and balanced:
            weight[:, list(CHANNELS)] /= factor


def step(model: nn.Module, run: Any, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a batch's loss."""
    model.zero_grad()
    output = run(input_ids=tokens, labels=tokens)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_mode(mode: str, model: nn.Module, factor: float, balanced: bool, batches: Sequence[Tensor]) -> Any:
    """``step`` of a copy of the model with large channels; delayed scales are those of other batches, and of none large."""
    torch._dynamo.reset()
    ours = copy.deepcopy(model)
    run = torch.compile(ours, backend="fp8compile", options=options(mode))
    for tokens in batches[1 : 1 + STEPS_BEFORE] if mode == JUMP else ():
        step(ours, run, tokens)
    make_large(ours, factor, balanced)
    return step(ours, run, batches[0])


def compared(exact: tuple[Tensor, dict[str, Tensor]], ours: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
    """SQNR in dB."""
    gradients = {name: sqnr(value, ours[1][name]) for name, value in exact[1].items()}
    down = by_channel(exact[1], ours[1], ("down_proj",), 0)
    rows = by_channel(exact[1], ours[1], ("gate_proj", "up_proj"), 1)
    return {
        "output_db": sqnr(exact[0], ours[0]),
        "worst_gradient_db": min(gradients.values()),
        "median_gradient_db": float(torch.tensor([*gradients.values()]).median()),
        "down_columns_db": quantiles(down),
        "gate_and_up_rows_db": quantiles(rows),
    }


def by_channel(exact: dict[str, Tensor], ours: dict[str, Tensor], names: Sequence[str], along: int) -> Tensor:
    """SQNR of each column (``along`` 0) or row (1) of the gradients of all weights of these names."""
    picked = [name for name in exact if name.split(".")[-2] in names]
    pairs = [(exact[name], ours[name].double()) for name in picked]
    found = [
        sqnr(x, y) for a, b in pairs for x, y in zip(a.unbind(1 - along), b.unbind(1 - along), strict=True) if x.any()
    ]
    return torch.tensor(found)


def quantiles(values: Tensor) -> dict[str, float]:
    return {"median": float(values.median()), "worst": float(values.double().quantile(WORST))}


def trained(
    steps: int, seed: int = 0, size: str = "cpu", weights: Path | None = None
) -> tuple[nn.Module, list[Tensor]]:
    """The demo's model after so many steps, and batches that it has not seen."""
    demo = Demo(SIZES[size], steps)
    model = build_model(demo.size, seed, CPU)

    def watch(done: int, optimizer: Any, its: nn.Module) -> None:
        if done == steps:
            model.load_state_dict(its.state_dict())

    if weights is not None and weights.exists():
        model.load_state_dict(torch.load(weights))
    else:
        demo.run(adamw, seed, watch=watch)
    if weights is not None:
        torch.save(model.state_dict(), weights)
    shape = demo.size.batch, demo.size.length
    return model, [*train_batches(demo.corpus.train, *shape, seed + 1, 1 + STEPS_BEFORE)]


def of_factor(model: nn.Module, batches: Sequence[Tensor], factor: float, balanced: bool) -> dict[str, Any]:
    """By mode, the figures of the model with channels made so large."""
    large = copy.deepcopy(model).double()
    make_large(large, factor, balanced)
    exact = step(large, large, batches[0])
    rows = {mode: compared(exact, in_mode(mode, model, factor, balanced, batches)) for mode in FIELDS}
    for mode, row in rows.items():
        print("balanced" if balanced else "not balanced", factor, mode, row, flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="SQNR with and without smoothed channels of SwiGLU.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--weights", type=Path, help="where the trained weights are kept, or are from an earlier run")
    parser.add_argument("--quick", action="store_true", help="a tiny model, hardly trained: does it run?")
    arguments = parser.parse_args(words)
    model, batches = trained(3, size="tiny") if arguments.quick else trained(300, weights=arguments.weights)
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    found = {**environment(), "channels": CHANNELS, "steps": 3 if arguments.quick else 300}
    for balanced, factors in ((True, FACTORS), (False, NOT_BALANCED)):
        name = "balanced" if balanced else "not balanced"
        rows = found[name] = before.get(name, {})
        for factor in factors[:2] if arguments.quick else factors:
            if str(factor) not in rows:
                rows[str(factor)] = of_factor(model, batches, factor, balanced)
                if arguments.json:
                    write_json(arguments.json, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
