"""Patterns that match nothing: remarked on for the whole model, with the nearest name, and never for one graph of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.reporting.entries import RECIPE
from tests.support.measure import compiled

SMALL: dict[str, Any] = {"saved.min_numel": 0, "debug.codegen": "eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.exp(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Two blocks, and between them a graph break if asked for."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second, self.drop, self.breaks = Block(), Block(), nn.Dropout(0.0), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(torch.sin(x))


def remarks(breaks: bool, half: bool = False, **fields: Any) -> tuple[str, ...]:
    """On the patterns, of ``explain``; the same as of ``report``."""
    model, x = Net(breaks), torch.randn(8, 16)
    if half:
        model, x = model.half(), x.half()
    report = fp8compile.explain(model, (x,), recipe=Recipe(**SMALL | fields))
    assert not [s for s in report.notes.skipped(RECIPE) if "fp32.keep" in s.reason]
    torch._dynamo.reset()
    run = compiled(model, **fields, **{"saved.min_numel": 0})
    run(x).sum().backward()
    assert fp8compile.report(run).remarks == report.remarks  # type: ignore[arg-type]
    return tuple(r for r in report.remarks if r.startswith("Recipe."))


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"skip": ["frist"]}, "Recipe.skip: 'frist': no module of this Net is called so. Did you mean 'first'?"),
        ({"linears.skip": ["first.dwon"]}, "Recipe.linears.skip: 'first.dwon': no module of this Net is called so. "
         "Did you mean 'first.down'?"),
        ({"modules": {"secnd": "off"}}, "Recipe.modules['secnd']: no module of this Net is called so. "
         "Did you mean 'second'?"),
        ({"modules": {"second": {"skip": ["second.upp"]}}}, "Recipe.modules['second'].skip: 'second.upp': no module of "
         "this Net is called so. Did you mean 'second.up'?"),
    ],
    ids=["skip", "linears.skip", "modules", "skip in modules"],
)  # fmt: skip
def test_no_module_is_called_so(fields: dict[str, Any], told: str, breaks: bool) -> None:
    assert remarks(breaks, **fields) == (told,)


def test_what_matches_in_one_of_the_graphs_is_not_remarked_on() -> None:
    for pattern in ("first", "second", "*.up", "second.down"):
        fields = {"skip": [pattern], "linears.skip": [pattern], "modules": {pattern: "off"}, "fp32.keep": [pattern]}
        assert remarks(True, half=True, **fields) == ()
    assert remarks(True, half=True, **{"fp32.keep": ["aten.exp", "aten.sin"]}) == ()


def test_keep_fp32_of_a_broken_model_names_what_is_near_in_all_of_it() -> None:
    assert remarks(True, half=True, **{"fp32.keep": ["secnd", "aten.exq"]}) == (
        "Recipe.fp32.keep: 'secnd': no module of this Net is called so. Did you mean 'second'?",
        "Recipe.fp32.keep: 'aten.exq': no graph of this Net holds such an operation. Did you mean 'aten.exp'?",
    )


def test_a_module_without_tensors_is_told_of_where_a_graph_may_not_know_its_path() -> None:
    assert remarks(False, skip=["drop"]) == ()
    (told,) = remarks(True, skip=["drop"])
    assert told.startswith("Recipe.skip: 'drop': no tensor in this report was made in such a module")


def test_the_output_heads_of_the_default_recipe_are_not_remarked_on() -> None:
    assert remarks(False) == () == remarks(True)
    assert remarks(False, **{"linears.skip": (*Recipe().linears.skip, "first")}) == ()
