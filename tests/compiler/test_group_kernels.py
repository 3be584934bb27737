"""Groups of codes are held in registers, whatever else a kernel reads; what is summed down columns is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fp8compile import _torch as private
from fp8compile.compiler import group_kernels
from fp8compile.compiler.group_kernels import COLUMN, with_groups_held
from fp8compile.linears.first_amax import GROUP


def held(
    monkeypatch: pytest.MonkeyPatch, length: int, *along: bool, theirs: bool = False, shared: bool = False
) -> bool:
    """Whether a kernel with sums of this length, each ``along`` rows or not, holds them; ``shared`` by several programs."""
    virtualized, asked = private.inductor_virtualized, list[bool]()
    monkeypatch.setattr(group_kernels, "sums_along_rows", lambda node: node)
    features: Any = SimpleNamespace(reduction_numel=length, reduction_nodes=lambda: along)
    sizes = SimpleNamespace(statically_known_equals=lambda a, b: a == b, statically_known_geq=lambda a, b: a >= b)
    handler: Any = SimpleNamespace(should_use_persistent_reduction=lambda *_: theirs)

    def inner() -> None:
        with virtualized.set_graph_handler(SimpleNamespace(sizevars=sizes)):  # type: ignore[arg-type]
            asked.append(virtualized.choices.should_use_persistent_reduction(features, shared))

    with virtualized.set_choices_handler(handler):
        with_groups_held(inner)()
    return asked[0]


def test_groups_along_rows_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    assert held(monkeypatch, GROUP, True, True)


@pytest.mark.parametrize(
    ("length", "along", "shared"),
    [
        (GROUP, (True, False), False),
        (GROUP // 2, (True,), False),
        (2 * GROUP, (True,), False),
        (GROUP, (True,), True),
    ],
    ids=["one down columns", "shorter", "longer", "shared by several programs"],
)
def test_others_are_inductor_s_choice(
    monkeypatch: pytest.MonkeyPatch, length: int, along: tuple[bool, ...], shared: bool
) -> None:
    for theirs in (False, True):
        assert held(monkeypatch, length, *along, theirs=theirs, shared=shared) is theirs


def test_columns_are_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not held(monkeypatch, 64, False, False, theirs=True)
    assert held(monkeypatch, 64, True, False, theirs=True), "rows beside them are held"
    assert held(monkeypatch, COLUMN // 2, False, theirs=True), "a short column is Inductor's choice"
