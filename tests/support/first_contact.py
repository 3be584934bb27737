"""Runs of the first contact in toy sizes, and what they told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import first_contact
from benchmarks.first import facts

SCRIPT = Path(first_contact.__file__)


def command(out: Path, *words: str, seconds: float = 60) -> list[str]:
    """A run on a CPU."""
    size = ("--device", "cpu", "--tiny", "--out", str(out), "--seconds", str(seconds))
    return [sys.executable, str(SCRIPT), *size, *words]


def told(out: Path) -> list[dict[str, Any]]:
    """Its facts so far."""
    found = list(out.glob("*.jsonl"))
    return facts.read(found[0]) if found else []


def ended(out: Path) -> dict[str, str]:
    """The arms that ended, and how."""
    return facts.outcomes(told(out))
