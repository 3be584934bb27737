"""An example beside its twin: what the same file does without fp8compile.

    python -m tests.integrations.twins plain_loop             trains both, and prints a row of docs/guide/trainers.md
    python -m tests.integrations.twins peft_lora rank=16      with another argument of its train()

A twin has the same seed and data. It is not compiled, and where the example has our AdamW it has torch's. On a CPU matmuls in
FP8 are emulated.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

import fp8compile
from fp8compile.reporting.report import Report
from tests.integrations.vision import FOR_ANOTHER_TORCH, define_operators


@dataclass(frozen=True)
class Run:
    """One training run: the losses, and the report of the compiled model (None: the twin)."""

    losses: Sequence[float]
    report: Report | None = None

    @property
    def loss(self) -> float:
        """The mean loss over the last quarter of the steps."""
        last = self.losses[-max(len(self.losses) // 4, 1) :]
        return sum(last) / len(last)


@dataclass(frozen=True)
class Outcome:
    """A run and its twin."""

    ours: Run
    twin: Run

    @property
    def report(self) -> Report:
        assert self.ours.report is not None
        return self.ours.report

    @property
    def gap(self) -> float:
        """How much higher our loss is than the twin's, in per cent."""
        return 100 * (self.ours.loss / self.twin.loss - 1)

    @property
    def row(self) -> str:
        """Training graphs, matmuls in FP8, bytes saved for backward (plain Inductor's, then ours), the gap."""
        done, left = len(self.report.linears), len(self.report.notes.skipped("linear"))
        graphs = sum(graph.kind == "training" for graph in self.report.graphs)
        saved = f"{self.report.saved_bytes_plain:,} → {self.report.saved_bytes:,}"
        return f"{graphs} | {done} of {done + left} | {saved} | {self.gap:+.2f} %"


def beside_its_twin(example: ModuleType, **changes: Any) -> Outcome:
    """``example.train(**changes)``, as the file stands and as its twin."""
    with _in_a_folder_of_its_own():
        model, losses = example.train(**changes)
        ours = Run(losses, fp8compile.report(model))
    return Outcome(ours, twin_of(example, **changes))


def twin_of(example: ModuleType, **changes: Any) -> Run:
    """The twin alone. The example must ask for fp8compile, and for nothing else."""
    backends = list[str]()

    def compiled(model: Any, *, backend: str, **_: Any) -> Any:
        backends.append(backend)
        return model

    with (
        _in_a_folder_of_its_own(),
        mock.patch.object(torch, "compile", compiled),
        mock.patch.object(nn.Module, "compile", compiled),
        mock.patch.object(fp8compile.optim, "AdamW", _torch_s_adamw),
    ):
        _, losses = example.train(**changes)
    assert set(backends) == {"fp8compile"}
    return Run(losses)


def _torch_s_adamw(trained: Any, *, compiled: bool = True, **settings: Any) -> torch.optim.Optimizer:
    """In place of ``fp8compile.optim.AdamW``, which takes a module too."""
    return torch.optim.AdamW(trained.parameters() if isinstance(trained, nn.Module) else trained, **settings)


@contextlib.contextmanager
def _in_a_folder_of_its_own() -> Iterator[None]:
    """What an example writes, and the variables that it sets, are gone afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main(name: str, *changes: str) -> None:
    if FOR_ANOTHER_TORCH:
        define_operators()
    given = {key: int(value) for key, value in (change.split("=") for change in changes)}
    outcome = beside_its_twin(importlib.import_module(f"examples.{name}"), **given)
    print(f"| `{' '.join((name, *changes))}` | {outcome.row} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
