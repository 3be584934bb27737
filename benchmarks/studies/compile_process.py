"""A compilation of the demo's Llama in a process of its own, for studies: the arms, the program's parts, its CPU seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "inductor"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "storage_only": {"linears": "off"},
    "emulated linears": {"linears.emulate": True},
}
MODEL = """
import dataclasses, json, resource, sys, torch
from fp8compile.extras.demo.model import SIZES, build_model

options, layers, way = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
size = dataclasses.replace(SIZES["cpu"], layers=layers)
model = build_model(size, 0, torch.device("cpu"))
tokens = torch.randint(0, 256, (size.batch, size.length))
"""
TIMED = """
def spent():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

def seconds():
    start = spent()
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return spent() - start

first = seconds()
print(first - seconds())
"""


def cpu_seconds(compiling: str, arm: str, layers: int, way: str, cache: str) -> float:
    """CPU seconds of the first step less the second, those of the compiler's processes included.

    ``compiling`` is the part of the program that makes ``compiled`` of ``model``; it knows ``options`` and ``way``.
    ``cache`` is Inductor's folder.
    """
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else workers that outlive the step compile, and are not counted
    command = [sys.executable, "-c", MODEL + compiling + TIMED, json.dumps(ARMS[arm]), str(layers), way]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])
