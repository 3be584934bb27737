"""recompute_kept: rows that were gathered are gathered again."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from fp8compile.fx.cheap import is_cheap
from fp8compile.fx.partition import PartitionedGraph
from tests.support.experts import any_experts, experts_case
from tests.support.graphs import split_of
from tests.support.measure import compiled, gradients

aten = torch.ops.aten
GATHER = aten.index.Tensor
EXACT = "encode_saved"  # switched off, so that what is saved are values


def _gathered(split: PartitionedGraph) -> list[bool]:
    """For each gather of tokens in the forward, whether its result is saved."""
    saved = {e.forward for e in split.edges}
    return [n in saved for n in split.fw.graph.find_nodes(op="call_function", target=GATHER)]


def test_tokens_are_gathered_again() -> None:
    """Those of the forward: tokens, weights of rows, and results put back; of the last the backward needs none."""
    layer, x = experts_case(512, hidden=128, inner=192, experts=8)
    args = (x, any_experts(layer, 512))
    assert not any(_gathered(split_of(layer, *args, disabled=EXACT)))
    torch._dynamo.reset()
    kept = _gathered(split_of(layer, *args, disabled=f"{EXACT},recompute_kept"))
    assert kept.count(True) == 1


def test_what_is_gathered_from_is_made_once() -> None:
    """The router's wgrad reads the norm's result too: one of it, before the first of the two that read it."""
    layer, x = experts_case(512, hidden=128, inner=192, experts=8)
    split = split_of(layer, x, any_experts(layer, 512), disabled=EXACT)
    tokens = next(n for n in split.bw.graph.find_nodes(op="call_function", target=GATHER) if n.meta["val"].dim() == 2)
    rows = tokens.args[0]
    assert isinstance(rows, Node)
    assert {user.target for user in rows.users} == {GATHER, aten.mm.default}


@pytest.mark.parametrize(("dtype", "again"), [(torch.int64, True), (torch.int32, True), (torch.bool, False)])
def test_a_mask_s_rows_stay(dtype: torch.dtype, again: bool) -> None:
    """How many there are, only a run knows. (Upstream's cut may gather by a mask again of itself.)"""
    graph = Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    with FakeTensorMode():
        x.meta["val"], rows.meta["val"] = torch.empty(8, 4), torch.empty(8, dtype=dtype)
    assert is_cheap(graph.call_function(GATHER, (x, [rows]))) == again


def test_without_codes_gradients_are_those_of_before_to_the_bit() -> None:
    layer, x = experts_case(512, hidden=128, inner=192, experts=8)
    args = (x, any_experts(layer, 512))
    found = []
    for off in ("recompute_kept", ""):
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=",".join(filter(None, ("encode_saved", off)))):
            found.append(gradients(layer, compiled(layer, **{"saved.min_numel": 0}), args))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
