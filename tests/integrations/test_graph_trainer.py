"""The passes for torchtitan's graph_trainer, on graphs that are traced and marked as it traces and marks them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import Recipe
from fp8compile._version import release_of
from fp8compile.fx.graph import SPLICED
from fp8compile.integrations import graph_trainer
from fp8compile.integrations.graph_trainer import NO_BACKWARD, OFFLOADS, OVERWRITES, Fp8Passes
from fp8compile.integrations.overwriting import BACKWARD, is_backward, overwrites
from tests.integrations.one_graph import Block, decibels, step_of

aten = torch.ops.aten
LINEARS = Recipe(linears={"emulate": True}, debug={"codegen": "eager"}, saved="off")
SAVED = Recipe(linears="off")


def step(loss: Any = None) -> tuple[GraphModule, list[Any]]:
    torch.manual_seed(0)
    return step_of(nn.Sequential(Block(), Block()), torch.randn(128, 256), **({"loss": loss} if loss else {}))


def runs_of(gm: GraphModule) -> int:
    """How often the forward and the backward take turns."""
    marks = [is_backward(node) for node in gm.graph.nodes]
    return 1 + sum(a != b for a, b in itertools.pairwise(marks))


def test_what_it_keeps_is_stored_as_codes() -> None:
    gm, inputs = step()
    expected, inputs_before = gm(*inputs), [n.name for n in gm.graph.find_nodes(op="placeholder")]
    passes = Fp8Passes(SAVED)
    for each in (passes.fp8_linears_pass, passes.fp8_saved_pass):
        gm = each(gm)
    found, report = gm(*inputs), passes.report
    assert [n.name for n in gm.graph.find_nodes(op="placeholder")] == inputs_before and runs_of(gm) == 3
    assert report is not None and not report.linears and not report.remarks
    # the input and result of each norm, the operand and result of each silu, the last result; the first input is the caller's
    elements = 2 * 128 * 256 * (1 + 1 + 2 + 2)
    assert report.saved_bytes_plain == 4 * (elements + 2 * 2 * 128)  # and each norm's mean and rstd
    # torch 2.11 takes silu's backward apart into an exp, so that its operands stay exact there
    exact = 0 if release_of(torch.__version__) >= (2, 12) else 4 * 2 * 128 * 512
    assert report.saved_bytes - exact < 0.27 * (report.saved_bytes_plain - exact)
    assert torch.equal(expected[0], found[0]), "the forward stays as it is"
    assert all(decibels(a, b) > 38 for a, b in zip(expected[1:], found[1:], strict=True))


def test_linears_are_in_fp8_and_what_was_inserted_is_marked() -> None:
    gm, inputs = step()
    expected, passes = gm(*inputs), Fp8Passes(LINEARS)
    gm = passes.fp8_linears_pass(gm)
    assert passes.report is not None and len(passes.report.linears) == 4 * 3
    assert runs_of(gm) == 3, "the forward, the backward, and what is returned"
    inserted = [n for n in gm.graph.nodes if SPLICED in n.meta and n.op == "call_function"]
    assert inserted and {n.meta["custom"]["module_fqn"] for n in inserted} == {"layers.0"}
    assert all(decibels(a, b) > 18 for a, b in zip(expected[1:], gm(*inputs)[1:], strict=True))


def test_each_run_of_operations_of_ours_is_a_region() -> None:
    gm, _ = step()
    passes = Fp8Passes(SAVED)
    for each in (passes.fp8_linears_pass, passes.fp8_saved_pass, passes.fp8_regions_pass):
        gm = each(gm)
    regions: dict[str, list[Any]] = {}
    for node in gm.graph.nodes:
        if name := (node.meta.get("custom") or {}).get("compile_with_inductor", {}).get("inductor_region"):
            regions.setdefault(name, []).append(node)
    assert len(regions) == 2 * len(passes.report.saved)  # type: ignore[union-attr]
    for nodes in regions.values():
        assert all(SPLICED in n.meta for n in nodes) and len({is_backward(n) for n in nodes}) == 1
        assert nodes == [n for n in gm.graph.nodes if nodes[0] <= n <= nodes[-1]]


def test_an_encoding_and_a_decoding_that_follow_each_other_are_two_regions() -> None:
    gm = make_fx(lambda x: x.sin().cos())(torch.ones(2))
    encoding, decoding = (node for node in gm.graph.nodes if node.op == "call_function")
    encoding.meta[SPLICED] = decoding.meta[SPLICED] = "by hand"
    decoding.meta[BACKWARD] = True
    Fp8Passes(SAVED).fp8_regions_pass(gm)
    assert encoding.meta["custom"] != decoding.meta["custom"]


def test_a_norm_that_overwrites_its_own_mean_is_made_functional() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        return (y * y.square().mean(-1, keepdim=True).add_(1e-5).rsqrt()).sum()  # type: ignore[no-any-return]

    gm, _ = step(loss)
    assert any(map(overwrites, gm.graph.nodes))
    passes = Fp8Passes(SAVED)
    gm = passes.fp8_saved_pass(passes.fp8_linears_pass(gm))
    assert not any(map(overwrites, gm.graph.nodes)) and not passes.report.remarks  # type: ignore[union-attr]


def test_what_is_read_after_it_was_overwritten_stays_exact() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        with torch.no_grad():
            y[0].mul_(2)
        return (y.detach().sin() * model(x)).sum()  # type: ignore[no-any-return]

    gm, inputs = step(loss)
    expected, passes = gm(*inputs), Fp8Passes(SAVED)
    gm = passes.fp8_saved_pass(passes.fp8_linears_pass(gm))
    assert all(map(torch.equal, expected, gm(*inputs)))
    said = passes.report.remarks  # type: ignore[union-attr]
    assert said[0] == OVERWRITES and said[1].startswith("the backward reads sin, made from memory that the graph")


def test_what_is_moved_to_the_cpu_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_trainer, "OFFLOADING", aten.silu.default.namespace)
    gm, _ = step()
    passes = Fp8Passes(SAVED)
    gm = passes.fp8_saved_pass(passes.fp8_linears_pass(gm))
    assert passes.report is not None and passes.report.remarks == (OFFLOADS,) and not passes.report.saved


def test_a_graph_without_a_backward_is_left_alone() -> None:
    gm, _ = step()
    for node in gm.graph.nodes:
        node.meta.pop(BACKWARD, None)
    before, passes = str(gm.graph), Fp8Passes(LINEARS)
    gm = passes.fp8_saved_pass(passes.fp8_linears_pass(gm))
    assert str(gm.graph) == before
    assert passes.report is not None and passes.report.remarks == (NO_BACKWARD,) and not passes.report.linears


def test_linears_with_frozen_weights_are_known_where_the_host_says_how_much_state_it_has() -> None:
    torch.manual_seed(0)
    gm, _ = step_of(nn.Sequential(Block(), Block()), torch.randn(128, 256))
    out = gm.graph.output_node()
    results: Any = out.args[0]
    out.args = (results[:1] + results[7:],)  # without the gradients of the first block
    gm.graph.eliminate_dead_code()
    passes = Fp8Passes(LINEARS, state=12)
    passes.fp8_linears_pass(gm)
    assert passes.report is not None and len(passes.report.linears) == 4 + 2 + 2
