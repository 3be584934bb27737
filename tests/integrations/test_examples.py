"""Every example runs as a reader runs it: by its path, in another folder, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.vision import FOR_ANOTHER_TORCH
from tests.support.sources import ROOT, imports

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Such a torchvision stops timm and transformers before an example begins.
WITH_OPERATORS = (
    "import runpy, sys; from tests.integrations.vision import define_operators; define_operators(); "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)


def missing(example: Path) -> list[str]:
    """What an example imports and nobody has installed."""
    needed = sorted({name.split(".")[0] for name in imports(example)})
    return [name for name in needed if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_by_its_path_and_prints_its_report(example: Path, tmp_path: Path) -> None:
    if names := missing(example):
        pytest.skip(f"not installed: {', '.join(names)}")
    command = [sys.executable, *(["-c", WITH_OPERATORS] if FOR_ANOTHER_TORCH else []), str(example)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fp8compile: 1 training graph\b", done.stdout, re.M), done.stdout
    assert re.search(r"^linears: \d+ of \d+ matmuls in FP8", done.stdout, re.M), done.stdout
    losses = re.search(r"^loss (\d+\.\d+) -> (\d+\.\d+)$", done.stdout, re.M)
    assert losses and float(losses[2]) < float(losses[1]), done.stdout
