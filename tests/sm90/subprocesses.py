"""Run a script of this package in a process of its own: what it mocks, it mocks for good (fake_h100.py)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .checked import MEMORY

_PACKAGE = __package__ or "sm90"
_ABOVE = Path(__file__).parents[_PACKAGE.count(".") + 1]
TIMEOUT_S = 550  # below pytest's own, in pyproject.toml


@functools.cache
def result_of(script: str, *arguments: str, interpret: bool = False) -> Any:
    """What ``script``, e.g. ``run_storage``, prints as JSON, given ``arguments``.

    Run once per session, with caches of its own.
    """
    with tempfile.TemporaryDirectory(prefix="sm90_caches_") as caches:
        done = subprocess.run(
            [sys.executable, "-m", f"{_PACKAGE}.{script}", *arguments],
            env=os.environ | _environment(caches, interpret),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, f"{script} failed:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)


def _environment(caches: str, interpret: bool) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(_ABOVE), *sys.path]),
        "TRITON_INTERPRET": "1" if interpret else "0",
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TMPDIR": caches,
        "OMP_NUM_THREADS": "1",
        MEMORY: str(Path(tempfile.gettempdir()) / "sm90_checked"),
    }
