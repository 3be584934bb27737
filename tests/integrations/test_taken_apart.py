"""Backward operations taken apart: the same gradients, and what belongs to a node belongs to its parts."""

from __future__ import annotations

import torch
from torch import nn

from fp8compile.fx.graph import SPLICED
from fp8compile.integrations.overwriting import BACKWARD, is_backward
from fp8compile.integrations.taken_apart import take_apart
from tests.integrations.one_graph import Block, decibels, step_of

aten = torch.ops.aten


def test_what_inductor_takes_apart_is_taken_apart() -> None:
    torch.manual_seed(0)
    gm, inputs = step_of(Block(64), torch.randn(16, 64))
    expected = gm(*inputs)
    first = next(n for n in gm.graph.nodes if is_backward(n)).prev
    take_apart(gm.graph)
    gm.graph.lint()
    gm.recompile()
    targets = {str(node.target) for node in gm.graph.nodes}
    assert not any("silu_backward" in each or "layer_norm_backward" in each for each in targets)
    assert all(decibels(a, b) > 120 for a, b in zip(expected, gm(*inputs), strict=True))
    node = first.next
    while node.op != "output":
        assert node.meta[BACKWARD] and node.meta["custom"] == {"module_fqn": "layers.0"} and SPLICED not in node.meta
        node = node.next


def test_products_attention_and_what_inductor_keeps_stay() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(1, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.cut(x).view(1, 2, 4, 8)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    gm, inputs = step_of(Image(), torch.randn(1, 1, 6, 6))
    expected = gm(*inputs)
    take_apart(gm.graph)
    gm.recompile()
    kept = {n.target for n in gm.graph.nodes if "backward" in str(n.target)}
    assert aten.convolution_backward.default in kept and len(kept) == 2, kept
    assert all(map(torch.equal, gm(*inputs), expected))
