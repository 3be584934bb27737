"""Tests of which ``make test`` runs one case at most, and ``make test-all`` every one: functions of more than four seconds.

``tests/nightly.txt`` has a line for each function, with the case that stays in ``make test``: its fastest, below three
seconds. A function without such a case waits as a whole; what CI must see of its kind is in a faster test. A new test that
takes long gets a line. A file that stands there waits as a whole: kernels of one kind lowered for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def read(text: str) -> Mapping[str, str | None]:
    """By function, the case that stays; None where none does."""
    lines = (line.partition(" | ") for line in text.splitlines())
    return {function: case or None for function, _, case in lines}


NIGHTLY = read(Path(__file__).with_suffix(".txt").read_text())


def waits(node_id: str) -> bool:
    """Whether a test is for ``make test-all`` alone."""
    function, _, case = node_id.partition("[")
    return function.partition("::")[0] in NIGHTLY or (function in NIGHTLY and case[:-1] != NIGHTLY[function])
