"""debug.check="first_step" of a graph in which ranks meet: not compared, and said so."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fp8compile.compiler.first_step import RANKS
from tests.support.ranks import one_of_two


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with one_of_two():
        yield


@pytest.mark.parametrize("parallel", [True, False])
def test_sharded_weights(two_ranks: None, parallel: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    if parallel:
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    run = torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager", "debug.check": "first_step"})
    with caplog.at_level(logging.WARNING, "fp8compile"):
        run(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert (RANKS in caplog.messages) == parallel
