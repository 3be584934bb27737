"""Collections of garbage are seldom while a graph is compiled, and as before behind it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fp8compile.compiler.garbage import SELDOM, collected_seldom
from tests.support.measure import compiled


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_seldom_inside_and_as_before_behind_it_and_behind_an_error() -> None:
    gc.set_threshold(700, 9, 8)
    with collected_seldom():
        assert gc.get_threshold() == (SELDOM, 9, 8)
        with collected_seldom():
            assert gc.get_threshold() == (SELDOM, 9, 8)
        assert gc.get_threshold() == (SELDOM, 9, 8)
    assert gc.get_threshold() == (700, 9, 8)
    with pytest.raises(KeyError), collected_seldom():
        raise KeyError
    assert gc.get_threshold() == (700, 9, 8)


@pytest.mark.parametrize("first", [0, SELDOM, 2 * SELDOM])
def test_who_collects_less_often_or_not_at_all_is_left(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    before = gc.get_threshold()
    with collected_seldom():
        assert gc.get_threshold() == before


def test_both_graphs_of_a_model_are_compiled_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.set_threshold(700, 10, 10)
    seen = list[int]()
    inner = torch._inductor.compile_fx.compile_fx_inner

    def noting(*args: object, **kwargs: object) -> object:
        seen.append(gc.get_threshold()[0])
        return inner(*args, **kwargs)

    monkeypatch.setattr("fp8compile._torch.compile_fx_inner", noting)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    compiled(model, codegen="inductor")(torch.randn(64, 64)).sum().backward()
    assert seen == [SELDOM, SELDOM] and gc.get_threshold()[0] == 700
