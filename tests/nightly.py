"""Tests that ``make test`` leaves to ``make test-all``: what takes more than three seconds, and of satellites more than one.

``tests/nightly.txt`` has a line for each, of one of these forms. What ``make test`` must see of its kind is in a faster test.

    file::function | case    but for this case, its fastest
    file::function[case]     this case
    file::function           all of it
    file                     kernels of one kind lowered for a GPU

Satellites are benchmarks, examples, integrations, papers, the explorer and ``fp8compile.extras``.
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
    if node_id in NIGHTLY or function.partition("::")[0] in NIGHTLY:
        return True
    return function in NIGHTLY and case[:-1] != NIGHTLY[function]
