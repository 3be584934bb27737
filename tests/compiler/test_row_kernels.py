"""Codes that are stored across rows are kept out of kernels that take one row at a time.

On a GPU only: that no such store is left, and what it takes, is in tests/sm90/test_layers_sm90.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import _torch as private
from fp8compile.compiler import row_kernels
from fp8compile.compiler.group_kernels import with_groups_held
from fp8compile.compiler.near_kernels import with_near_kernels
from tests.support.fusion import compiled_asking


@pytest.mark.parametrize("with_rule", [row_kernels.with_tiles_for_codes, with_near_kernels, with_groups_held])
def test_the_rule_holds_while_a_graph_is_compiled_and_no_longer(with_rule: Callable[..., Any]) -> None:
    before = private.inductor_virtualized.choices
    seen = []

    def inner(*args: Any, **kwargs: Any) -> str:
        seen.append((private.inductor_virtualized.choices is before, args, kwargs))
        return "compiled"

    assert with_rule(inner)("graph", option=1) == "compiled"
    assert seen == [(False, ("graph",), {"option": 1})]
    assert private.inductor_virtualized.choices is before


@pytest.mark.parametrize(("theirs", "allowed"), [(True, True), (True, False), (False, True), (False, False)])
def test_two_nodes_are_fused_where_inductor_and_the_rule_agree(theirs: bool, allowed: bool) -> None:
    handler = SimpleNamespace(can_fuse=lambda *_: theirs)
    virtualized = private.inductor_virtualized
    with virtualized.set_choices_handler(handler), row_kernels.fusing_only_where(lambda *_: allowed):
        assert virtualized.choices.can_fuse(None, "first", "second", 0) is (theirs and allowed)


def test_a_lazily_compiled_backward_is_compiled_under_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        row_kernels, "_scatters", lambda *_: bool(asked.append(private.inductor_virtualized.graph.is_backward))
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    with private.inductor_config.patch("force_disable_caches", True):
        compiled = torch.compile(model, backend="fp8compile", options={"linears.scaling": "delayed"})
        compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert set(asked) == {False, True}


def along_rows(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (y := (x + b).sum(-1)), y.relu() + 1


def down_columns(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (y := (x + b).sum(0)), y.relu() + 1


def down_blocks(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (y := (x + b).view(4, 16, 48).sum(1)), y.relu() + 1


@pytest.mark.parametrize(("fn", "along"), [(along_rows, True), (down_columns, False), (down_blocks, False)])
def test_which_sums_are_along_rows(fn: Callable[..., Any], along: bool) -> None:
    """Although all add a row to each row: it is read along rows in any case."""
    found = set[bool]()

    def allowed(scheduler: Any, *nodes: Any) -> bool:
        found.update(row_kernels.sums_along_rows(node) for node in nodes if node.is_reduction())
        return True

    compiled_asking(allowed, fn, torch.randn(64, 48), torch.randn(48))
    assert found == {along}
