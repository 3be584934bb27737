"""share_casts: a value cast to two dtypes keeps a cast to each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8compile.passes.share_casts import CAST
from tests.support.graphs import joint_of


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(32, 16).bfloat16(), nn.Linear(32, 16).half()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        both = [
            self.low(x.bfloat16()) + self.low(x.bfloat16().relu()),
            self.high(x.half()) + self.high(x.half().relu()),
        ]
        return both[0].float() + both[1].float()


def test_a_cast_serves_those_of_its_dtype_alone() -> None:
    graph = joint_of(
        TwoDtypes(),
        torch.randn(16, 32, requires_grad=True),
        fp32="off",
        **{"linears.emulate": True, "fp32.observe": False},
    )
    casts = [n.args[1] for n in graph.find_nodes(op="call_function", target=CAST) if n.args[0].name == "mul"]  # type: ignore[union-attr]
    assert sorted(map(str, casts)) == ["torch.bfloat16", "torch.float16"]
