"""recompute_kept: rows that were gathered are gathered again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.recompute_kept import _is_by_position
from tests.support.experts import any_experts, experts_case
from tests.support.graphs import split_of
from tests.support.measure import compiled, gradients

aten = torch.ops.aten


class Gathered(nn.Module):
    """``norm(x)[of] W``, beside a matmul that reads the norm's result itself, as a router does."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.norm = nn.RMSNorm(64)
        self.first, self.router, self.up = (nn.Linear(64, n, bias=False) for n in (64, 16, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return torch.cat([self.up(h[self.rows]).sum(0), self.router(h).sum(0)])


def _gathered(split: PartitionedGraph) -> list[bool]:
    """For each gather of the forward, whether its result is saved."""
    saved = {e.forward for e in split.edges}
    return [n in saved for n in split.fw.graph.find_nodes(op="call_function", target=aten.index.Tensor)]


def test_rows_by_their_numbers_are_gathered_again() -> None:
    split = split_of(Gathered(torch.arange(128).repeat(2).flip(0)), torch.randn(128, 64))
    assert _gathered(split) == [False]
    assert len(split.bw.graph.find_nodes(op="call_function", target=aten.index.Tensor)) == 1


def test_what_is_gathered_from_is_made_once() -> None:
    """The router's wgrad reads the norm's result too: one of it, before the first of the two that read it."""
    split = split_of(Gathered(torch.arange(128).repeat(2)), torch.randn(128, 64))
    gather = split.bw.graph.find_nodes(op="call_function", target=aten.index.Tensor)[0]
    rows = gather.args[0]
    assert isinstance(rows, torch.fx.Node)
    alike = [n for n in split.bw.graph.nodes if n.target is rows.target and n.args == rows.args]
    assert alike == [rows] and len(rows.users) == 2


@pytest.mark.parametrize(("dtype", "again"), [(torch.int64, True), (torch.int32, True), (torch.bool, False)])
def test_a_mask_s_rows_stay(dtype: torch.dtype, again: bool) -> None:
    """How many there are, only a run knows. (Upstream's cut may gather by a mask again of itself.)"""
    graph = Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    with FakeTensorMode():
        x.meta["val"], rows.meta["val"] = torch.empty(8, 4), torch.empty(8, dtype=dtype)
    assert _is_by_position(graph.call_function(aten.index.Tensor, (x, [rows]))) == again


def test_a_layer_of_experts_keeps_each_token_once() -> None:
    layer, x = experts_case()
    split = split_of(layer, x)
    assert not any(_gathered(split)[:1]), "tokens, k times"


def test_without_codes_gradients_are_those_of_before_to_the_bit() -> None:
    layer, x = experts_case()
    args = (x, any_experts(layer, 128))
    found = []
    for off in ("recompute_kept", ""):
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=",".join(filter(None, ("encode_saved", off)))):
            found.append(gradients(layer, compiled(layer, min_saved_numel=0), args))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
