"""What a mutant is: one small fault, where it is put, and the nearest tests, which are to notice it.

``old`` stands once in its file; the runner (``run.py``) refuses a table that does not fit the sources any more. Faults are
such as a hurried change makes: a bound on the wrong side, a case forgotten, the last for the first, a mark not handed on.
The tables: ``of_numerics.py``, ``of_graphs.py`` (passes, analyses) and ``of_training.py`` (reports and recipes, amp, optim).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: area and what is wrong.
        file: from the root of the repository.
        old, new: the text that stands there once, and what is put in its place.
        tests: what pytest is asked for, nearest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
