"""A small model compiled and run once in a process of its own, for what must hold from process to process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
dynamic = {"dynamic": True, "static": False, "default": None}[sys.argv[2]]
fn = torch.compile(model, backend="fp8compile", options=json.loads(sys.argv[1]), dynamic=dynamic)
fn(torch.randn(128, 64)).sum().backward()
names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
print(json.dumps({
    "counters": {n: counters["aot_autograd"][n] for n in names},
    "fx_bypass": counters["inductor"]["fxgraph_cache_bypass"],
    "report": fp8compile.report(fn).to_json(),
    "gradients": [p.grad.double().sum().item() for p in model.parameters()],
}))
"""


def run_in_process(
    folder: Path,
    options: Mapping[str, Any],
    *,
    cache: str = "inductor",
    shapes: str = "default",
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a process says that compiles and runs the model once, with Inductor's cache in ``folder / cache``."""
    (folder / "net.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "net.py"), json.dumps(options), shapes],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / cache), **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
