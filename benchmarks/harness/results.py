"""A results file: what was measured on one device, by whom and with what, row by row.

    <device>-<date>.json    cpu-tiny-2026-11-22.json, nvidia-h100-80gb-hbm3-2026-11-22.json

A run that goes on after midnight goes on in yesterday's file. Each row says which commit it was measured at.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fp8compile
from benchmarks.harness.environment import commit, cpu_name

FOLDER = Path(__file__).resolve().parents[1] / "results"
DATED = re.compile(r"(.+)-(\d{4}-\d\d-\d\d)\.json")


def key_of(benchmark: str, case: str) -> str:
    """The name of a row."""
    return f"{benchmark}: {case}"


@dataclass
class Results:
    """Rows, and the file that they are in."""

    path: Path
    head: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, folder: Path, device: str, tiny: bool) -> Results:
        """The file of this device of today or yesterday, or a new one."""
        today = datetime.datetime.now(datetime.timezone.utc).date()
        name = device_name(device) + ("-tiny" if tiny else "")
        for day in (today, today - datetime.timedelta(days=1)):
            path = folder / f"{name}-{day}.json"
            if path.exists():
                return cls.read(path)
        return cls(folder / f"{name}-{today}.json", head(device, tiny))

    @classmethod
    def read(cls, path: Path) -> Results:
        """A file that is there."""
        document = json.loads(path.read_text())
        return cls(path, {name: value for name, value in document.items() if name != "rows"}, document["rows"])

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in and write the file."""
        self.rows[key_of(row["benchmark"], row["case"])] = finite({**row, "commit": commit()})
        self.write()

    def write(self) -> None:
        """Whole or not at all, whatever cuts it off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")
        partial.replace(self.path)


def head(device: str, tiny: bool) -> dict[str, Any]:
    """What all rows of a file share."""
    return {
        "device": device_text(device),
        "gpu": device == "cuda",
        "tiny": tiny,
        "what_tiny_means": "toy sizes, to try the machinery: no figure here says anything about speed"
        if tiny
        else None,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "fp8compile": fp8compile.__version__,
        },
        "threads": torch.get_num_threads(),
        "began": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def newest_on_gpu(folder: Path = FOLDER) -> Results | None:
    """The results that README's tables are made from: the youngest of a GPU at full size."""
    dated = sorted((found[2], path) for path in folder.glob("*.json") if (found := DATED.fullmatch(path.name)))
    for _, path in reversed(dated):
        results = Results.read(path)
        if results.head.get("gpu") and not results.head.get("tiny"):
            return results
    return None


def device_text(device: str) -> str:
    """A device as its maker calls it."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def device_name(device: str) -> str:
    """A device in a file's name."""
    return "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_text(device).lower()).strip("-")


def finite(value: Any) -> Any:
    """JSON has neither NaN nor inf: None stands for them."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
