"""While a graph is compiled Python looks at all objects rarely; behind it the collector is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fp8compile import _torch as private
from fp8compile.compiler.rare_collections import RARE, rare_collections

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def as_usual() -> Iterator[None]:
    before, on = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)
    (gc.enable if on else gc.disable)()


def test_thresholds_are_higher_inside_and_as_they_were_behind_it() -> None:
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == RARE
        with rare_collections():
            assert gc.get_threshold() == RARE
        assert gc.get_threshold() == RARE
        raise KeyError
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [(0, 10, 10), (50_000, 20, 100), RARE])
def test_who_collects_more_rarely_or_never_keeps_that(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_is_set_inside_stays() -> None:
    with rare_collections():
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with rare_collections():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_forward_and_backward_are_compiled_under_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    plain = private.compile_fx_inner

    def inner(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.get_threshold())
        return plain(*args, **kwargs)

    monkeypatch.setattr(private, "compile_fx_inner", inner)
    model = torch.compile(nn.Linear(8, 8), backend="fp8compile")
    loss = model(torch.randn(4, 8)).sum()
    assert gc.get_threshold() == USUAL
    loss.backward()
    assert seen == [RARE, RARE] and gc.get_threshold() == USUAL
