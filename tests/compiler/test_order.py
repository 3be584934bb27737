"""A joint graph that one of Inductor's passes left out of order, as it may: Inductor sorts after our hook."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph

from fp8compile.compiler.hooks import JointPasses
from tests.support.measure import compiled, gradient_sqnr


def test_a_node_behind_its_user() -> None:
    run, moved = JointPasses.__call__, []

    def out_of_order(self: JointPasses, graph: Graph) -> None:
        node = next(n for n in graph.nodes if n.op == "call_function" and any(u.op != "output" for u in n.users))
        user = next(u for u in node.users if u.op != "output")
        user.append(node)
        moved.append((node, user))
        run(self, graph)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(F.gelu(self.first(x)))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 64)
    with mock.patch.object(JointPasses, "__call__", out_of_order):
        quality = gradient_sqnr(model, compiled(model, linears="off", **{"saved.min_numel": 0}), (x,))
    assert moved and min(quality.values()) > 30
