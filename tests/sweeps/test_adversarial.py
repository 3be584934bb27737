"""Adversarial programs (tests/sweeps/programs) against eager: nothing wrong in any of them.

Every program is one test. Without ``--sweep`` those run that are marked for CI by ``in_ci``, under one arm; with it all of
them, under all arms of tests/sweeps/engine.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tests.sweeps.programs  # noqa: F401  (fills PROGRAMS)
from tests.sweeps.engine import ARMS, decibels, outcome, wrong
from tests.sweeps.registry import PROGRAMS

LEAST = 150


def in_ci(name: str) -> bool:
    """All that was reported as wrong before, all that eager refuses, and every fourth of the others."""
    others = [n for n in PROGRAMS if not n.startswith("reported") and "eager refuses" not in n]
    return name not in others or others.index(name) % 4 == 0


@pytest.mark.parametrize("name", [n if in_ci(n) else pytest.param(n, marks=pytest.mark.sweep) for n in PROGRAMS])
def test_program(name: str, sweep: bool, tally: Callable[..., None]) -> None:
    found = wrong(PROGRAMS[name], ARMS if sweep else {"stored": ARMS["stored"]})
    tally("adversarial programs", "wrong" if found else "argued" if PROGRAMS[name].argued else "right")
    assert not found, "\n".join(found)


def test_there_are_enough_programs() -> None:
    """Names are the registry's keys, so they are unique; that two have the same call would be a slip."""
    assert len(PROGRAMS) >= LEAST
    assert len({program.call for program in PROGRAMS.values()}) == len(PROGRAMS)


def test_eager_refuses_what_is_said_to_be_refused() -> None:
    """A program that raised by mistake would hold the backend to nothing but raising too."""
    for name, program in PROGRAMS.items():
        if "eager refuses" in name:
            assert isinstance(outcome(program, None).error, RuntimeError), name


def test_exemptions_are_argued() -> None:
    for program in PROGRAMS.values():
        assert all(len(why) > 20 for why in program.argued.values()), program.name


def test_the_engine_sees_what_is_wrong() -> None:
    """A gradient of a tenth more is 20 dB, a gradient that is missing, not finite or of another shape is no gradient."""
    x = torch.randn(64)
    assert abs(decibels(x, 1.1 * x) - 20) < 1e-3
    assert decibels(x, x) == decibels(None, None) == torch.inf
    for got in (None, x * torch.nan, x[:3], x.double()):
        assert decibels(x, got) == -torch.inf
    assert decibels(torch.zeros(3), torch.ones(3)) == -torch.inf
