"""Compiled functions: what is asked about a model takes a module, and says so with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile

OPTIONS = {"debug.codegen": "eager", "saved.min_numel": 0, "linears.emulate": True}


def test_a_function_is_reported_by_the_module_that_it_uses() -> None:
    linear = nn.Linear(64, 64)

    @torch.compile(backend="fp8compile", options=OPTIONS)
    def step(x: Tensor) -> Tensor:
        return torch.tanh(linear(x)).sum()

    step(torch.randn(32, 64)).backward()
    assert len(fp8compile.report(linear).linears) == 2, "forward and wgrad"


@pytest.mark.parametrize(
    "ask",
    [
        fp8compile.report,
        lambda f: fp8compile.explain(f, (torch.randn(32, 64),)),
        lambda f: fp8compile.set_recipe(f, "off"),
        lambda f: fp8compile.check(f, torch.randn(32, 64)),
        lambda f: fp8compile.tools.debug_step(f, torch.randn(32, 64)),
    ],
    ids=["report", "explain", "set_recipe", "check", "debug_step"],
)
def test_a_function_itself_is_refused_with_the_fix(ask: Callable[[Any], object]) -> None:
    compiled = torch.compile(lambda x: x.sin().sum(), backend="fp8compile", options=OPTIONS)
    compiled(torch.randn(32, 64, requires_grad=True)).backward()
    with pytest.raises(ValueError, match="module"):
        ask(compiled)
