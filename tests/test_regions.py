"""Nested compile regions: what is rewritten in them, what the report says, and gradients, against the model without regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile

OPTIONS = {"codegen": "eager", "emulate": True, "min_saved_numel": 0}


class Block(nn.Module):
    """A residual block; as a region where ``marked``."""

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.run: Callable[[Tensor], Tensor] = self.inner
        if marked:
            self.run = torch.compiler.nested_compile_region(self.inner)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Other(nn.Module):
    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.run: Callable[[Tensor], Tensor] = self.inner
        if marked:
            self.run = torch.compiler.nested_compile_region(self.inner)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Net(nn.Module):
    def __init__(self, marked: bool, kinds: str, checkpointed: bool) -> None:
        super().__init__()
        build = {"B": Block, "O": Other}
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(build[kind](marked) for kind in kinds)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def net(marked: bool, kinds: str, checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(marked, kinds, checkpointed)


def step(model: nn.Module, run: Any) -> dict[str, Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    run(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def compiled(model: nn.Module, **options: Any) -> tuple[dict[str, Tensor], fp8compile.Report]:
    torch._dynamo.reset()
    run = torch.compile(model, backend="fp8compile", options={**OPTIONS, **options})
    return step(model, run), fp8compile.report(run)


def sqnr(got: Tensor, exact: Tensor) -> float:
    return float(10 * torch.log10(exact.double().square().sum() / (got.double() - exact).square().sum()))


CASES = [("BBB", False), ("BOBOB", False), ("BB", True), ("BOB", True)]


@pytest.mark.parametrize(("kinds", "checkpointed"), CASES)
def test_products_and_bytes_are_those_of_the_model_without_regions(kinds: str, checkpointed: bool) -> None:
    _, inlined = compiled(net(False, kinds, checkpointed))
    _, regions = compiled(net(True, kinds, checkpointed))

    def products(report: fp8compile.Report) -> Counter[Any]:
        return Counter((x.origin.module, x.direction, x.M, x.K, x.N, x.formats) for x in report.linears)

    assert products(regions) == products(inlined)
    assert not [x for x in regions.linears if x.reason]
    assert len(regions.graphs) == 1
    if not checkpointed:
        assert regions.saved_bytes <= inlined.saved_bytes * 1.1
        assert regions.saved_bytes < regions.saved_bytes_plain / 2
        modules = {s.origin.module.split(".")[1] for s in regions.saved if s.origin.module.startswith("blocks.")}
        assert modules == {str(i) for i in range(len(kinds))}


@pytest.mark.parametrize(("kinds", "checkpointed"), CASES)
def test_gradients(kinds: str, checkpointed: bool) -> None:
    """Exact where nothing is rewritten, and as far from exact as those of the model without regions where all is."""
    model = net(True, kinds, checkpointed)
    exact = step(model, model)
    off, _ = compiled(model, preset="off")
    assert min(sqnr(off[name], exact[name]) for name in exact) > 100
    ours, _ = compiled(model)
    plain, _ = compiled(net(False, kinds, checkpointed))
    for name in exact:
        assert sqnr(ours[name], exact[name]) > sqnr(plain[name], exact[name]) - 3, name
