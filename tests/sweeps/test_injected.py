"""Deliberately wrong entries in the sensitivity analysis: random programs find every one of them.

Each is patched in alone; then programs in which its operations stand are judged until one is wrong, or has a gradient under
LEAST_DB, whatever its terms amount to. Without the wrong entry the program that found it is right and above.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import pytest
import torch

from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.analysis.sensitivity.walk import Walk
from fp8compile.fx import tracing
from fp8compile.numerics import groups
from fp8compile.saved import judge as saved_judge
from fp8compile.saved.judge import Judge
from tests.sweeps.random_judgement import CONDITION, LEAST_DB, Judgement, judge
from tests.sweeps.random_programs import program_of

aten = torch.ops.aten
Patch = Callable[[], contextlib.AbstractContextManager[object]]
NORMS = ("norm(", ".var(", ".std(", "rsqrt(", "normalize")
LONGEST, PROGRAMS = 8, 200  # lines a program; programs that hold the operation


def _is_in(name: str, *ops: object) -> Patch:
    """``ops`` stand in the list ``name``, and in no other that is asked first."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        poles = {op: pole for op, pole in R.POLES.items() if op not in ops}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(R, "POLES", poles))
            stack.enter_context(mock.patch.object(R, "EXPONENTIALS", R.EXPONENTIALS - set(ops)))
            stack.enter_context(mock.patch.object(R, name, getattr(R, name) | set(ops)))
            yield

    return patched


@contextlib.contextmanager
def _groups_span_rows() -> Iterator[None]:
    """Graphs of encoders that were traced before, or are traced here, are not used."""
    with mock.patch.object(groups, "SHORTEST", 2**40), mock.patch.dict(tracing._traced, clear=True):
        yield


@contextlib.contextmanager
def _ties_are_chosen() -> Iterator[None]:
    """And codes change sides: those that keep theirs are right at a tie too."""
    with (
        mock.patch.object(Sensitivity, "is_free_of_ties", lambda *_: True),
        mock.patch.object(Judge, "_sides", lambda *_: None),
    ):
        yield


# The wrong entry: words of which a program must hold one, and the patch.
INJECTED: Mapping[str, tuple[tuple[str, ...], Patch]] = {
    "reciprocal is non-expansive": (
        ("reciprocal", "1 /", "pow(-1)", "rsqrt"),
        _is_in("NON_EXPANSIVE", aten.reciprocal),
    ),
    "log is Lipschitz": (("* torch.log(",), _is_in("NON_EXPANSIVE", aten.log)),
    "rsqrt is non-expansive": (("rsqrt", "pow(-0.5)"), _is_in("NON_EXPANSIVE", aten.rsqrt)),
    "exp is linear": (("* torch.exp(", "= torch.exp("), _is_in("ADDITIONS", aten.exp)),
    "powers are non-expansive": (("pow(",), _is_in("NON_EXPANSIVE", aten.pow)),
    "an edge may choose among ties": (
        ("clamp",),
        _ties_are_chosen,
    ),
    "floor is non-expansive": (("torch.floor(",), _is_in("NON_EXPANSIVE", aten.floor)),
    "round is non-expansive": (("round",), _is_in("NON_EXPANSIVE", aten.round)),
    "trunc is non-expansive": (("trunc",), _is_in("NON_EXPANSIVE", aten.trunc)),
    "anything may be divided by": (
        (" / ", "log(", "sqrt"),
        lambda: mock.patch.object(Walk, "_keep_away", lambda *_: None),
    ),
    "no norm is found": (
        ("* 0.01 + state", "1 + 300 *"),
        lambda: mock.patch.object(Sensitivity, "norms", {}),
    ),
    "what is normalised may be made of codes": (
        ("1 + 300 *",),
        lambda: mock.patch.object(Sensitivity, "is_normalised", lambda *_: False),
    ),
    "what is normalised is stored beside its group": (
        NORMS,
        lambda: mock.patch.object(saved_judge, "about", lambda *_, **__: None),
    ),
    "groups span rows": (
        ("% 2 == 0, 300.0)",),
        _groups_span_rows,
    ),
    "phases may be large": (
        ("* 30.0", "* 100.0"),
        lambda: mock.patch.object(Walk, "_phase", lambda self, node, read, error: error),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", INJECTED)
def test_a_wrong_entry_is_found(name: str, tally: Callable[..., None]) -> None:
    words, patch = INJECTED[name]
    programs = (program_of(seed, torch.float32, CONDITION[torch.float32], LONGEST) for seed in itertools.count())
    for program in itertools.islice((p for p in programs if any(w in p.python for w in words)), PROGRAMS):
        with patch():
            found = judge(program)
        if _is_bad(found) and not _is_bad(judge(program)):
            print(f"{name}: {found.wrong or f'{found.worst_db:.1f} dB'}\n{program.python}")
            tally("injected entries", "found")
            return
    tally("injected entries", "missed")
    pytest.fail(f"{name}: {PROGRAMS} programs with {' or '.join(words)} are right")


def _is_bad(found: Judgement) -> bool:
    return bool(found.wrong) or found.worst_db < LEAST_DB
