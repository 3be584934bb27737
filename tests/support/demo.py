"""The demo without its compilers: every arm runs the eager model, on a toy size."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fp8compile.extras.demo import arms, compiling, loop
from fp8compile.extras.demo import run as demo
from fp8compile.extras.demo.data import Corpus, load_corpus
from fp8compile.extras.demo.precision import Precision

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, "FP32: a test", {})


@functools.cache
def corpus() -> Corpus:
    """The demo's text, read once."""
    return load_corpus()


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm runs the eager model in FP32; fp8compile's has a report all the same."""

    def report_of(arm: str, compiled: Any) -> compiling.BackendReport | None:
        return compiling.BackendReport("the report", '{"saved_bytes": 7}', 7, 9) if arm == arms.OURS else None

    monkeypatch.setattr(demo, "load_corpus", corpus)
    monkeypatch.setattr(demo, "choose_precision", lambda model, device, asked: FP32)
    monkeypatch.setattr(compiling, "warm_up_compiler", lambda device: None)
    monkeypatch.setattr(compiling, "compile_arm", lambda arm, model, options: model)
    monkeypatch.setattr(compiling, "report_of", report_of)


def run_tiny(folder: Path, console: Console | None = None, **options: Any) -> int:
    """The demo's exit code; what it says is dropped unless there is a ``console``."""
    return demo.run_demo(demo.DemoOptions(out=folder, tiny=True, **options), console or Console(quiet=True))


def documents(folder: Path) -> tuple[dict[str, Any], str]:
    """results.json and report.txt of a run."""
    return json.loads((folder / "results.json").read_text()), (folder / "report.txt").read_text(encoding="utf-8")


def interrupt_after(calls: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """``error`` once, instead of the training step that follows ``calls`` of them, in whichever arm has its turn."""
    step, count = loop.train_step, [0]

    def stub(*args: Any) -> float:
        count[0] += 1
        if count[0] == calls + 1:
            raise error
        return step(*args)

    monkeypatch.setattr(loop, "train_step", stub)
