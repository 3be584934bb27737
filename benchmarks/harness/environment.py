"""Where and when a row was measured."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.batches import digits_source
from benchmarks.harness.workarounds import bf16_in_fp32


def environment() -> dict[str, Any]:
    """Where and when a row was measured."""
    packages = [sys.modules[name] for name in ("torch", "fp8compile", "transformers", "timm") if name in sys.modules]
    versions = {"python": platform.python_version()} | {m.__name__: str(m.__version__) for m in packages}
    return {
        "versions": versions,
        "device": cpu_name(),
        "threads": torch.get_num_threads(),
        "bf16_products": "as FP32 products, rounded once" if bf16_in_fp32() else "by the CPU",
        "images": digits_source(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
    }


def cpu_name() -> str:
    """The processor as its maker calls it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Of the sources: what git says, or who made a copy of them to run (BENCHMARKED_COMMIT)."""
    if told := os.environ.get("BENCHMARKED_COMMIT"):
        return told

    def git(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        if shutil.which("git") is None:
            return ""
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../fp8compile", "../../passes")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
