"""Inductor's caches: equal recipes hit across processes, others miss, and the report is the same cold and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, torch, fp8compile
from torch import nn
from torch._dynamo.utils import counters

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))

torch.manual_seed(0)
model = Net()
compiled = torch.compile(model, backend="fp8compile", options=json.loads(sys.argv[1]))
compiled(torch.randn(128, 64)).sum().backward()
names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
print(json.dumps({
    "counters": {n: counters["aot_autograd"][n] for n in names},
    "fx_bypass": counters["inductor"]["fxgraph_cache_bypass"],
    "report": fp8compile.report(compiled).to_json(),
    "gradient": model.up.weight.grad.sum().item(),
}))
"""


def run(cache: Path, options: dict[str, Any]) -> dict[str, Any]:
    (cache / "net.py").write_text(SCRIPT)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    done = subprocess.run(
        [sys.executable, str(cache / "net.py"), json.dumps(options)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_equal_recipes_hit_others_miss_and_reports_agree(tmp_path: Path) -> None:
    cold = run(tmp_path, {})
    warm = run(tmp_path, {})
    assert cold["counters"] == {"autograd_cache_hit": 0, "autograd_cache_miss": 1, "autograd_cache_bypass": 0}
    assert warm["counters"] == {"autograd_cache_hit": 1, "autograd_cache_miss": 0, "autograd_cache_bypass": 0}
    assert warm["fx_bypass"] == cold["fx_bypass"] == 0
    assert warm["report"] == cold["report"] and json.loads(cold["report"])["graphs"][0]["notes"]["saved"]
    assert warm["gradient"] == cold["gradient"]

    other = run(tmp_path, {"saved_format": "int8"})
    assert other["counters"]["autograd_cache_miss"] == 1
    dumped = run(tmp_path, {"dump": str(tmp_path / "dump")})
    assert dumped["counters"]["autograd_cache_hit"] == 1, "a dump changes nothing that is compiled or cached"

    for path in (tmp_path / "inductor" / "fp8compile").glob("*.json"):
        path.unlink()
    lost = run(tmp_path, {})
    assert "does not hold its report" in lost["report"], "a report that is gone is told, not shown as empty"


@pytest.mark.parametrize("name", ["cut_for_bytes", "recompute_kept", "encode_saved"])
def test_no_pass_is_named_inside_another(name: str) -> None:
    from fp8compile.passes.cut_for_bytes import cut_for_bytes

    from fp8compile.pipeline import PARTITION

    names = [p.__name__ for p in (cut_for_bytes, *PARTITION)]
    assert [n for n in names if name in n] == [name]
