"""The facts that ``benchmarks/results`` holds, with their device, versions and commit.

Files of this script say these in every line. The first readings do not: ``first-contact-h200.json`` says them, and who did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first import facts
from benchmarks.first.comparisons import MODELS, Timed, ours_beside_plain
from benchmarks.first.facts import Fact

DATED = re.compile(r".+-first-(\d{4}-\d\d-\d\d)\.jsonl")


@dataclass(frozen=True)
class Reading:
    """Facts of one card at one commit.

    Attributes:
        path: the file that names them.
        device, versions, date, commit: of them all.
        found: the facts.
    """

    path: Path
    device: str
    versions: Mapping[str, str]
    date: str
    commit: str
    found: tuple[Fact, ...]

    @property
    def where(self) -> str:
        """On what it was measured."""
        return (
            f"{self.device}, torch {self.versions['torch']}, triton {self.versions['triton']}, commit {self.commit}"
        )


def readings(folder: Path) -> list[Reading]:
    """Of a GPU at full size, the oldest first."""
    named = [_named(path) for path in sorted(folder.glob("first-contact-*.json"))]
    dated = [made for path in folder.glob("*.jsonl") if DATED.fullmatch(path.name) for made in _dated(path)]
    return sorted((*named, *dated), key=lambda reading: reading.date)


def _named(path: Path) -> Reading:
    said: dict[str, Any] = json.loads(path.read_text())
    wrong = said["profiles_not_used"]
    found = tuple(
        fact
        for name in said["files"]
        for fact in facts.read(path.parent / name)
        if not (name in wrong and "kernels" in fact)
    )
    return Reading(path, said["device"], said["versions"], said["date"], said["commit"], found)


def _dated(path: Path) -> list[Reading]:
    """One for each commit that its lines name; a CPU's and toy sizes are none."""
    made = DATED.fullmatch(path.name)
    found = [fact for fact in facts.read(path) if not fact.get("tiny")]
    if made is None or path.name.startswith("cpu-"):
        return []
    commits = dict.fromkeys(fact["commit"] for fact in found)
    return [_at(path, made[1], [fact for fact in found if fact["commit"] == commit]) for commit in commits]


def _at(path: Path, date: str, found: list[dict[str, Any]]) -> Reading:
    head = found[-1]
    return Reading(path, head["device"], head["versions"], date, head["commit"], tuple(found))


def newest(folder: Path) -> Reading | None:
    """The youngest that sets us beside plain Inductor."""
    return next((reading for reading in reversed(readings(folder)) if ours_beside_plain(reading.found)), None)


def sides(reading: Reading) -> tuple[list[str], list[str]]:
    """What is faster than plain Inductor and what is slower, with speeds and what is kept."""
    pairs = ours_beside_plain(reading.found)
    found = sorted(((plain.fastest / row.fastest, plain, row) for plain, row in pairs), key=_by)
    faster = [_text(*each) for each in reversed(found) if each[0] >= 1]
    return faster, [_text(*each) for each in found if each[0] < 1]


def _by(each: tuple[float, Timed, Timed]) -> float:
    return each[0]


def _text(speed: float, plain: Timed, row: Timed) -> str:
    name, kept, of = MODELS[row.model], row.kept or row.peak, plain.kept or plain.peak
    name = f"Llama of 6 layers, {name.removeprefix('the same ')}" if name.startswith("the same") else name
    return f"{name}: **{speed:.2f} ×**, {'keeps' if row.kept else 'peak'} {kept} of {of}"


def status(reading: Reading) -> str:
    """README's status."""
    faster, slower = sides(reading)
    return (
        f"**Alpha. Measured on one {reading.device.removeprefix('NVIDIA ')}: of {len(faster) + len(slower)} models "
        f"and layers, {len(faster)} train faster than in plain Inductor, {len(slower)} slower ([which](#measured)).**"
    )


def summary(reading: Reading, results: str) -> str:
    """README's table: one row."""
    faster, slower = sides(reading)
    where = f"on one {reading.where}"
    return "\n".join(
        [
            f"| faster than plain Inductor {where} | slower there ([all figures]({results})) |",
            "|---|---|",
            f"| {'<br>'.join(faster) or 'nothing'} | {'<br>'.join(slower) or 'nothing'} |",
        ]
    )
