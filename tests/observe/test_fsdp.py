"""Observations under fully_shard: graphs compute with whole parameters, optimizers and reports hold this rank's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8compile
from fp8compile.compiler.running_model import as_registered
from fp8compile.observe import records

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.up(x))


def plain() -> nn.Sequential:
    """Two blocks, each compiled by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).half()
    for block in model:
        block.compile(backend="fp8compile", options={"fp32.observe": True, "debug.codegen": "eager"})
    return model


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    """The same, sharded on one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = plain()
        for block in model:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        yield model
    finally:
        distributed.destroy_process_group()


def backward(model: nn.Module) -> None:
    model(torch.randn(32, WIDTH, dtype=torch.float16)).float().square().mean().backward()


def test_the_parameters_that_it_has_seen_are_the_optimizers(model: nn.Sequential) -> None:
    backward(model)
    observed = records.of_model(model)
    assert len(observed) == 2
    seen = set().union(*(each.parameters_seen() for each in observed if isinstance(each, records.StatsSlot)))
    assert seen == {id(p) for p in model.parameters()}


def test_a_step_of_the_optimizer_ends_a_step_of_the_observations(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert {each.step for each in records.of_model(model)} == {3}


def counts(model: nn.Module) -> tuple[float, float]:
    """Small and large gradients of one update, as its loss scaler sees them."""
    torch.manual_seed(1)
    scaler, optimizer, found = fp8compile.amp.LossScaler(), torch.optim.SGD(model.parameters(), lr=0.1), []
    policy = scaler._policy
    scaler._policy = lambda now, seen: (found.append(seen), policy(now, seen))[1]  # type: ignore[assignment,func-returns-value]
    scaler.scale(model(torch.randn(32, WIDTH, dtype=torch.float16)).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    small, large, *_ = found[0].numbers.tolist()
    return small, large


def test_a_scaler_counts_each_gradient_once(model: nn.Sequential) -> None:
    assert counts(model) == counts(plain()) != (0, 0)


def test_the_overflow_report_finds_them(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="nothing observed"):
        fp8compile.tools.overflow_report(model)
    backward(model)
    assert "up" in str(fp8compile.tools.overflow_report(model))


def test_a_parameter_that_nobody_shards_is_itself() -> None:
    p = nn.Parameter(torch.ones(2))
    assert as_registered([p]) == [p]
