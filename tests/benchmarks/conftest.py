"""Benchmarks that generate no code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8compile.optim import compiled_step

PLAIN = torch.compile


@pytest.fixture
def nothing_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and rewritten, then run node by node: the C++ compiler takes nearly all of the time otherwise.

    ``fp8compile bench --device cpu --tiny`` (make nightly) runs them through it.
    """

    def quick(model: Any, *, backend: Any = "inductor", options: Any = None, **more: Any) -> Any:
        if backend == "inductor":
            return PLAIN(model, backend="aot_eager", **more)
        return PLAIN(model, backend=backend, options={**(options or {}), "debug.codegen": "eager"}, **more)

    def step_by_step(signature: Any, piece: Any) -> Any:
        return compiled_step._eager(signature.plan, piece)

    monkeypatch.setattr(torch, "compile", quick)
    monkeypatch.setattr(compiled_step, "_compiled", step_by_step)
