"""Inductor's caches: equal recipes hit across processes, others miss, and the report is the same cold and warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.compiler import inductor
from tests.support.measure import compiled
from tests.support.processes import run_in_process as run


def test_equal_recipes_hit_others_miss_and_reports_agree(tmp_path: Path) -> None:
    cold = run(tmp_path, {})
    warm = run(tmp_path, {})
    assert cold["counters"] == {"autograd_cache_hit": 0, "autograd_cache_miss": 1, "autograd_cache_bypass": 0}
    assert warm["counters"] == {"autograd_cache_hit": 1, "autograd_cache_miss": 0, "autograd_cache_bypass": 0}
    assert warm["fx_bypass"] == cold["fx_bypass"] == 0
    assert warm["report"] == cold["report"] and json.loads(cold["report"])["graphs"][0]["notes"]["saved"]
    assert warm["gradients"] == cold["gradients"]

    other = run(tmp_path, {"saved": "int8"})
    assert other["counters"]["autograd_cache_miss"] == 1
    dumped = run(tmp_path, {"debug.dump": str(tmp_path / "dump")})
    assert dumped["counters"]["autograd_cache_hit"] == 1, "a dump changes nothing that is compiled or cached"

    for path in (tmp_path / "inductor" / "fp8compile").glob("*.json"):
        path.unlink()
    lost = run(tmp_path, {})
    assert "does not hold its report" in lost["report"], "a report that is gone is told, not shown as empty"


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"),
    reason="this torch knows no memory budgets of regions",
)
def test_a_regions_memory_budget_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides how the graph is cut. The report of another cut must not be shown."""
    keys: list[str] = []
    key_of = inductor.key_of

    def noted(*args: Any, **kwargs: Any) -> str:
        keys.append(key_of(*args, **kwargs))
        return keys[-1]

    monkeypatch.setattr(inductor, "key_of", noted)

    def keys_with(budget: float) -> list[str]:
        def step(x: Tensor) -> Tensor:
            with torch.autograd.graph.region_activation_memory_budget(budget):  # type: ignore[attr-defined]
                return x.sin().exp().sum()

        torch._dynamo.reset()
        keys.clear()
        compiled(step)(torch.randn(8, 8, requires_grad=True))  # type: ignore[arg-type]
        return keys[:]

    assert len(keys_with(0.5)) == 1
    assert keys_with(0.5) == keys_with(0.5) != keys_with(0.1)
