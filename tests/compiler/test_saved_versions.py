"""An encoded input or result that the caller changes before the backward: refused as in eager; anything else is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile

REFUSED = "modified by an inplace operation"


class Squashed(nn.Module):
    """Its result is what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


class Fed(nn.Module):
    """Its input is what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(F.gelu(x))


def ours(model: nn.Module) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager", "saved.min_numel": 0})


@pytest.mark.parametrize("compile_it", [lambda m: m, ours], ids=["eager", "fp8compile"])
def test_a_result_that_is_changed_is_refused(compile_it: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    y = compile_it(Squashed())(torch.randn(32, 64))
    y.mul_(2)
    with pytest.raises(RuntimeError, match=REFUSED):
        y.sum().backward()


@pytest.mark.parametrize("compile_it", [lambda m: m, ours], ids=["eager", "fp8compile"])
def test_an_input_that_is_changed_is_refused(compile_it: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    x = torch.randn(32, 64, requires_grad=True) * 1
    y = compile_it(Fed())(x)
    x.detach().add_(1)  # the same memory and version
    with pytest.raises(RuntimeError, match=REFUSED):
        y.sum().backward()


def test_they_are_kept_as_codes() -> None:
    for model, what in ((Squashed(), "output 0"), (Fed(), "input 0")):
        fn = ours(model)
        fn(torch.randn(32, 64, requires_grad=True) * 1).sum().backward()
        assert what in {s.belongs_to for s in fp8compile.report(fn).saved}  # type: ignore[arg-type]


def test_what_is_not_changed_or_gone_is_not_refused() -> None:
    fn = ours(Squashed())
    y = fn(torch.randn(32, 64))
    loss = (y * 2).sum()
    del y
    loss.backward()
    y = fn(torch.randn(32, 64))
    (y + 1).mul_(2).sum().backward()


def test_nothing_is_noted_without_gradients() -> None:
    fn = ours(Squashed())
    with torch.no_grad():
        fn(torch.randn(32, 64)).mul_(2)
