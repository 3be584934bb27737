"""What all facts of a run share, found without torch: a run starts at once."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

VERSIONS = ("torch", "triton", "transformers", "torchvision", "peft", "torchao", "liger-kernel", "flashoptim")
RESERVED_GIB = 8.0
HOST_GIB = 200.0


def head(device: str, tiny: bool) -> dict[str, Any]:
    """Device, versions and commit."""
    found: dict[str, Any] = {"device": _device(device), "versions": _versions(), "commit": _commit()}
    return found | ({"tiny": True} if tiny else {})


def file(folder: Path, device: str, tiny: bool) -> Path:
    """The facts of this device of today or yesterday: a run that goes on after midnight goes on in its file."""
    name = "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", _device(device).lower()).strip("-")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    of = [folder / f"{name}{'-tiny' * tiny}-first-{today - datetime.timedelta(days=back)}.jsonl" for back in (0, 1)]
    return next((path for path in of if path.exists()), of[0])


def gib(device: str) -> float:
    """What arms may take together."""
    told = _asked("memory.total") if device == "cuda" else None
    return float(told) / 1024 - RESERVED_GIB if told else HOST_GIB if device == "cpu" else 80 - RESERVED_GIB


def _device(device: str) -> str:
    if device == "cuda":
        return _asked("name") or "cuda"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _asked(what: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return lines[0].strip() if lines else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str:
    """What git says, or who made a copy of the sources to run (BENCHMARKED_COMMIT)."""
    if told := os.environ.get("BENCHMARKED_COMMIT"):
        return told
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
