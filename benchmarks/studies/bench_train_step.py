"""A whole step as one graph beside the three calls: losses of the demo, peak, gradients alive, time, compilation.

    python benchmarks/studies/bench_train_step.py --json benchmarks/results/train-step-cpu.json

losses   the demo (torch.optim.AdamW, clipping at 1, cosine schedule): the loss of each step as one graph, and by three calls
         under the same recipe; and by three calls with the windows of each batch in another order. That changes nothing but
         the order of sums, and is what a difference is held against.
memory   a Llama of 12 layers, 64 tokens, no clipping: what a step allocates at its peak beyond what was there before, by
         torch.profiler; the shortest of 20 steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from fp8compile.extras.demo.data import load_corpus, train_batches
from fp8compile.extras.demo.loop import CLIP_NORM, set_rate
from fp8compile.extras.demo.model import SIZES, Size, build_model, build_optimizer, rate_schedule
from fp8compile.tools.step_memory import measured_peak

ONE, THREE, REORDERED = "one graph", "three calls", "three calls, windows in another order"
DEEP = dataclasses.replace(SIZES["tiny"], layers=12, length=256)
TOKENS = 64  # few, so that gradients count
RECIPE: Mapping[str, Any] = {"linears": "off"}
TIMED = 20
Step = Callable[[Tensor], Tensor]


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def one_graph(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Any:
    return fp8compile.train_step(model, loss_fn, optimizer, recipe=dict(RECIPE), clip_norm=clip_norm, fallback=False)


def three_calls(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Step:
    compiled: Any = torch.compile(model, backend="fp8compile", options=dict(RECIPE))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_fn(compiled, tokens)
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def losses(arm: str, size: Size, steps: int) -> dict[str, Any]:
    """The loss of each step of the demo, the median time of a step, and what the graph told."""
    torch._dynamo.reset()
    model = build_model(size, 0, torch.device("cpu"))
    optimizer, rate = build_optimizer(model, size.rate), rate_schedule(steps)
    step = (one_graph if arm == ONE else three_calls)(model, optimizer, CLIP_NORM)
    found: list[float] = []
    seconds: list[float] = []
    for tokens in train_batches(load_corpus().train, size.batch, size.length, 0, steps):
        set_rate(optimizer, size.rate * rate(len(found)))
        begin = time.perf_counter()
        found.append(float(step(tokens.flip(0) if arm == REORDERED else tokens)))
        seconds.append(time.perf_counter() - begin)
    told = {"compilations": step.summary.compilations} if arm == ONE else {}  # type: ignore[attr-defined]
    return {"losses": found, "median_seconds": sorted(seconds)[len(seconds) // 2], **told}


def memory(arm: str, size: Size) -> dict[str, Any]:
    """Peak and time of a step; of one graph the gradients that are alive too."""
    torch._dynamo.reset()
    model = build_model(size, 0, torch.device("cpu"))
    optimizer = fp8compile.optim.AdamW(model, lr=1e-3, state_format="fp32")
    tokens = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    step = (one_graph if arm == ONE else three_calls)(model, optimizer, None)
    step(tokens)
    peak = measured_peak(lambda: step(tokens))
    told = step.summary if arm == ONE else None  # type: ignore[attr-defined]
    alive = {"gradient_peak": told.gradient_peak} if told else {}
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    least = min(_seconds(lambda: step(tokens)) for _ in range(TIMED))
    return {"peak": peak, "gradients": gradients, "seconds": least, **alive}


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=SIZES["cpu"].steps)
    parser.add_argument("--tiny", action="store_true", help="the demo's smallest model, and one of 2 layers")
    arguments = parser.parse_args(words)
    size = SIZES["tiny"] if arguments.tiny else SIZES["cpu"]
    deep = dataclasses.replace(DEEP, layers=2) if arguments.tiny else DEEP
    found: dict[str, Any] = {**environment(), "steps": arguments.steps, "losses": {}, "memory": {}}
    for arm in (ONE, THREE):
        found["memory"][arm] = memory(arm, deep)
        print(arm, found["memory"][arm], flush=True)
    for arm in (ONE, THREE, REORDERED):
        found["losses"][arm] = losses(arm, size, arguments.steps)
        print(arm, found["losses"][arm]["losses"][-1], found["losses"][arm]["median_seconds"], flush=True)
        if arguments.json:
            write_json(arguments.json, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({key: value for key, value in main().items() if key != "losses"}, indent=1))
