"""A training step of a whole model, an arm a row, each alone on the device: tokens per second and where the memory goes.

    peak = weights + gradients + optimizer states + activations + the rest

weights, gradients and states are the bytes of their storages; activations what the forward leaves for the backward (on a
GPU what the allocator holds more after it, on a CPU the storages that autograd holds); peak is the allocator's, GPU only.
Where gradients are released during the backward they never exist together, and count 0.

    python benchmarks/e2e/bench_training.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.e2e.training import ARMS, Trainer
from benchmarks.harness import peers
from benchmarks.harness.llama import LLAMA2_7B, LLAMA_1B, TINY, Shape
from benchmarks.harness.memory import state_bytes
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import measured, no_lap
from benchmarks.registry import Benchmark, Case, Row, Setting
from fp8compile.reporting.memory import storage_bytes
from fp8compile.tools.step_memory import saved_bytes

MOST_ROUNDS = 9  # a step of such a model is long, and varies little


def measure(case: Case, setting: Setting) -> Row:
    """One arm: the split of its memory, then its time."""
    name, shape = case.shape["arm"], Shape(**case.shape["model"])
    batch, length = case.shape["batch"], case.shape["length"]
    if why := peers.why_not(name, setting.device):
        return {"arms": {}, "left_out": {name: why}}
    trainer = Trainer(shape, ARMS[name], batch, length, setting.device)
    trainer.step(no_lap)  # compiles, makes the optimizer's states
    memory = memory_split(trainer, setting.device)
    times, failed = measured({name: trainer.step}, setting.device, min(setting.rounds, MOST_ROUNDS))
    row: Row = {"arms": times, "left_out": failed, "memory": {name: memory}}
    if name in times:
        seconds = sum(lap["seconds"] for lap in times[name].values())
        row["tokens_per_second"] = {name: batch * length / seconds}
    return row


def memory_split(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """Bytes by purpose, of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    parameters = list(trainer.model.parameters())
    found: dict[str, float] = {"weights": storage_bytes(parameters), "states": state_bytes(trainer.optimizer)}
    found["activations"] = _activations(trainer, device)
    trainer.forward().backward()
    found["gradients"] = storage_bytes(p.grad for p in parameters if p.grad is not None)
    if not trainer.released:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["peak"] = torch.cuda.max_memory_allocated()
        found["rest"] = found["peak"] - sum(found[name] for name in ("weights", "gradients", "states", "activations"))
    return found


def _activations(trainer: Trainer, device: torch.device) -> int:
    if device.type != "cuda":
        return saved_bytes(trainer.forward, [*trainer.model.parameters(), trainer.tokens, *trainer.tables])
    before = torch.cuda.memory_allocated()
    loss = trainer.forward()
    after = torch.cuda.memory_allocated()
    del loss
    return after - before


def _cases(label: str, shape: Shape, batch: int, length: int, *arms: str) -> tuple[Case, ...]:
    def values(arm: str) -> dict[str, Any]:
        return {"model": asdict(shape), "batch": batch, "length": length, "arm": arm}

    return tuple(Case(f"{label} {batch}x{length}, {arm}", values(arm)) for arm in arms)


BENCHMARKS = (
    Benchmark(
        "training_step",
        "e2e",
        "a step of a whole model: tokens per second; peak by weights, gradients, states, activations",
        tuple(name for name in ARMS if name != "ours"),
        (
            *_cases("7b", LLAMA2_7B, 1, 2048, "ours", "ours, gradients released", "inductor", "torchao"),
            *_cases("1b", LLAMA_1B, 8, 2048, *ARMS),
        ),
        _cases("tiny", TINY, 1, 64, "ours", "inductor", "torchao"),
        measure,
        limit=400,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
