"""Nested compile regions: what is rewritten in them, what the report says, and gradients, against the plain model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.reporting.entries import LINEAR, SAVED
from fp8compile.reporting.report import Report
from tests.support.reference import sqnr_db

OPTIONS = {"debug.codegen": "eager", "linears.emulate": True, "saved.min_numel": 0}
OFF = {"preset": "off", "linears.emulate": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x))


class BlockRegion(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


class OtherRegion(Other):
    forward = torch.compiler.nested_compile_region(Other.forward)


class Net(nn.Module):
    def __init__(self, marked: bool, kinds: str, checkpointed: bool) -> None:
        super().__init__()
        build = {"B": BlockRegion, "O": OtherRegion} if marked else {"B": Block, "O": Other}
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(build[kind]() for kind in kinds)
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


def compiled(model: nn.Module, **options: Any) -> tuple[dict[str, Tensor], Report]:
    torch._dynamo.reset()
    run = torch.compile(model, backend="fp8compile", options={**OPTIONS, **options})
    return step(model, run), fp8compile.report(run)


CASES = [("BBB", False), ("BOBOB", False), ("BB", True), ("BOB", True)]


@pytest.mark.parametrize(("kinds", "checkpointed"), CASES)
def test_products_and_bytes_are_those_of_the_model_without_regions(kinds: str, checkpointed: bool) -> None:
    _, inlined = compiled(net(False, kinds, checkpointed))
    _, regions = compiled(net(True, kinds, checkpointed))

    def products(report: Report) -> Counter[Any]:
        return Counter((x.origin.module, x.direction, x.M, x.K, x.N, x.formats) for x in report.linears)

    assert products(regions) == products(inlined)
    assert not regions.notes.skipped(LINEAR)
    assert len(regions.graphs) == 1
    if not checkpointed:
        # What goes into a region is kept by it, and once more by what made it: the stem, and each block O in between.
        twice = (64 * 32 + 2 * 16) * (1 + kinds.count("O"))
        statistics = (
            32 * 4 * len(kinds)
        )  # mean and rsqrt of a norm, of which the cut without regions keeps one beside x
        assert regions.saved_bytes <= inlined.saved_bytes + twice + statistics
        assert regions.saved_bytes < regions.saved_bytes_plain / 2
        modules = {s.origin.module.split(".")[1] for s in regions.saved if s.origin.module.startswith("blocks.")}
        assert modules == {str(i) for i in range(len(kinds))}


@pytest.mark.parametrize(("kinds", "checkpointed"), CASES)
def test_gradients(kinds: str, checkpointed: bool) -> None:
    """Exact where nothing is rewritten, and as far from exact as those of the model without regions where all is."""
    model = net(True, kinds, checkpointed)
    exact = step(model, model)
    off, _ = compiled(model, **OFF)
    assert min(sqnr_db(exact[name], off[name]) for name in exact) > 100
    ours, _ = compiled(model)
    plain, _ = compiled(net(False, kinds, checkpointed))
    for name in exact:
        assert sqnr_db(exact[name], ours[name]) > sqnr_db(exact[name], plain[name]) - 3, name


@pytest.mark.parametrize("kinds", ["BB", "BOB"])
def test_a_region_in_a_checkpoint_saves_nothing_and_the_report_says_so(kinds: str) -> None:
    _, report = compiled(net(True, kinds, checkpointed=True))
    assert report.linears and not report.saved
    assert all("operand of the higher-order" in skip.reason for skip in report.notes.skipped(SAVED))


def test_the_report_belongs_to_each_call() -> None:
    _, report = compiled(net(True, "BBB"))
    assert {s.origin.module[:8] for s in report.saved} >= {f"blocks.{i}" for i in range(3)}
    assert not report.remarks and len(report.graphs) == 1


def test_weights_that_a_region_keeps_are_nobodys_bytes() -> None:
    """Without rewriting: what the regions keep is what plain Inductor's cut keeps, no weight among it."""
    _, off = compiled(net(True, "BBB"), **OFF)
    _, inlined = compiled(net(False, "BBB"), **OFF)
    assert off.saved_bytes == off.saved_bytes_plain
    assert abs(off.saved_bytes - inlined.saved_bytes) <= 2 * 32 * 64 * 4, "a tensor or two that the boundary moves"


def test_a_recipe_that_differs_between_the_calls_is_followed() -> None:
    _, report = compiled(net(True, "BBB"), modules={"blocks.1": "off"})
    assert {x.origin.module[:8] for x in report.notes.skipped(LINEAR)} == {"blocks.1"}
    assert not [s for s in report.saved if s.origin.module.startswith("blocks.1.")]
    assert "the recipe differs between modules" in report.remarks[0]


def test_statistics_are_taken_in_regions() -> None:
    names = []
    for marked in (False, True):
        torch._dynamo.reset()
        model = net(marked, "BB").half()
        run: Any = torch.compile(model, backend="fp8compile", options={**OPTIONS, "fp32.observe": True})
        run(torch.randn(32, 64).half()).square().sum().backward()
        names.append(Counter((o.origin.module, o.kind, o.direction) for o in fp8compile.report(run).observed))
    assert names[0] == names[1] and any("blocks.1.up" in module for module, *_ in names[1])


def test_a_region_in_a_region_compiles() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = BlockRegion()

        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.block(x))

    torch.manual_seed(0)
    model = nn.Sequential(Inner(), Inner(), Inner())
    exact = step(model, model)
    ours, _ = compiled(model)
    assert min(sqnr_db(exact[name], ours[name]) for name in exact) > 15


def test_a_region_in_inference_compiles() -> None:
    torch._dynamo.reset()
    model = net(True, "BB")
    x = torch.randn(32, 64)
    with torch.no_grad():
        run = torch.compile(model, backend="fp8compile", options=OPTIONS)
        assert torch.allclose(run(x), model(x), atol=1e-5)
