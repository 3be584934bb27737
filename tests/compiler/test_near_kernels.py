"""No kernel holds values of two layers; under a memory budget none holds values from both sides of a matmul."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.scheduler import Scheduler
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import _torch as private
from fp8compile.compiler import near_kernels
from fp8compile.compiler.near_kernels import BETWEEN_TWO, WITHIN_A_LAYER, places_of
from tests.support.budgets import EXACT
from tests.support.graphs import traced
from tests.support.reference import sqnr_db


def test_a_place_is_how_many_products_stand_before_a_value_or_are_it() -> None:
    graph = traced(lambda x, w: torch.tanh(torch.tanh(x) @ w) @ w + 1, [(8, 8), (8, 8)]).graph
    found = [(node.name, place) for node, place in places_of(graph).items() if node.op == "call_function"]
    assert found == [("tanh", 0), ("mm", 1), ("tanh_1", 1), ("mm_1", 2), ("add", 2)]


def test_what_is_written_back_stands_where_it_is_made() -> None:
    """As running means of batch norms, whose copies into the module's buffers end a graph; not what is copied elsewhere."""

    def step(x: Tensor, w: Tensor, mean: Tensor) -> Tensor:
        updated, own = mean + x, mean * 2
        y = (x @ w) @ w
        own.copy_(updated)
        mean.copy_(updated)
        return own + y

    graph = make_fx(step)(*(torch.randn(8, 8) for _ in range(3))).graph
    found = [place for node, place in places_of(graph).items() if node.target is torch.ops.aten.copy_.default]
    assert found == [2, 0]


def lowered_from(*origins: Node) -> Any:
    """A scheduler's node of one operation."""
    node = SimpleNamespace(node=SimpleNamespace(origins=origins))
    return SimpleNamespace(get_nodes=lambda: [node])


def nodes_of(graph: Graph) -> dict[str, Any]:
    return {node.name: lowered_from(node) for node in graph.nodes}


def test_two_operations_may_be_one_kernel_where_no_product_stands_between() -> None:
    graph = traced(lambda x, w: torch.tanh(torch.tanh(x) @ w) * 2, [(8, 8), (8, 8)]).graph
    at = nodes_of(graph)
    with private.inductor_virtualized.set_graph_handler(SimpleNamespace(graph=graph)):
        allowed = near_kernels._Near(BETWEEN_TWO)
        assert allowed(None, at["tanh_1"], at["mul"])
        assert not allowed(None, at["tanh"], at["tanh_1"])
        assert allowed(None, at["tanh"], lowered_from())  # Inductor's own: from no operation of the graph


def test_an_operation_of_several_stands_where_the_last_of_them_does() -> None:
    graph = traced(lambda x, w: torch.tanh(torch.tanh(x) @ w) * 2, [(8, 8), (8, 8)]).graph
    at, by_name = nodes_of(graph), {node.name: node for node in graph.nodes}
    both = lowered_from(by_name["tanh"], by_name["tanh_1"])
    with private.inductor_virtualized.set_graph_handler(SimpleNamespace(graph=graph)):
        allowed = near_kernels._Near(BETWEEN_TWO)
        assert allowed(None, both, at["mul"]) and not allowed(None, both, at["tanh"])


class Layers(nn.Module):
    """Products that all read one table between them, as layers read a rotary embedding; norms with weights."""

    def __init__(self, count: int = 3, size: int = 64) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))
        self.norms = nn.ModuleList(nn.RMSNorm(size) for _ in range(count))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for step, norm in zip(self.steps, self.norms, strict=True):
            x = x + step(norm(x) * table)
        return x


@contextmanager
def kernels() -> Iterator[list[set[int]]]:
    """Of each kernel that Inductor generates meanwhile, the places of its operations."""
    found: list[set[int]] = []
    codegen = Scheduler.codegen

    def caught(self: Any) -> Any:
        places = places_of(private.inductor_virtualized.graph.graph)
        for group in self.nodes:
            each = [places[o] for n in group.get_nodes() for o in [last_origin(n, places)] if o in places]
            found.append(set(each))
        return codegen(self)

    with mock.patch.object(Scheduler, "codegen", caught):
        yield found


def last_origin(node: Any, places: dict[Node, int]) -> Node | None:
    known = [origin for origin in getattr(node.node, "origins", ()) if origin in places]
    return max(known, key=places.__getitem__, default=None)


def gradients(model: nn.Module, *args: Tensor, **options: Any) -> tuple[dict[str, Tensor], list[set[int]]]:
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    with kernels() as found, private.inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(model, backend="fp8compile", options={"preset": "off", **options})
        compiled(*args).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, found


def test_generated_code_under_a_budget_and_without() -> None:
    """A budget of bytes that nothing exceeds, so that nothing is given up: the same graph, in other kernels."""
    torch.manual_seed(0)
    model, x, table = Layers(), torch.randn(128, 64), torch.randn(128, 64)
    exact, plain = gradients(model, x, table)
    found, near = gradients(model, x, table, memory=10**9)
    assert max(map(len, plain)) > 1, "no kernel of plain Inductor crosses a product here: the model shows nothing"
    assert max(map(len, near)) == 1
    assert min(sqnr_db(exact[name], found[name]) for name in exact) > EXACT


RULES = [({}, None), ({"saved": "auto"}, WITHIN_A_LAYER), ({"memory": 10**9}, BETWEEN_TWO)]


@pytest.mark.parametrize(("options", "apart"), RULES, ids=["off", "rewritten", "budget"])
def test_how_far_apart_depends_on_the_recipe(
    options: dict[str, Any], apart: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()
    monkeypatch.setattr(near_kernels._Near, "__call__", lambda rule, *_: bool(asked.add(rule.apart)) or True)
    gradients(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(32, 16), **options)
    assert asked == (set() if apart is None else {apart})


def test_no_kernel_holds_values_of_two_layers() -> None:
    """Each layer has one product forward and two backward: twelve of them are further apart than any rule's layer."""
    torch.manual_seed(0)
    model, x, table = Layers(12), torch.randn(128, 64), torch.randn(128, 64)
    exact, plain = gradients(model, x, table)
    found, near = gradients(model, x, table, saved="auto", **{"saved.min_numel": 10**9})
    furthest = [max(max(places) - min(places) for places in kernels if places) for kernels in (plain, near)]
    assert furthest[0] > WITHIN_A_LAYER >= furthest[1] > BETWEEN_TWO
    assert min(sqnr_db(exact[name], found[name]) for name in exact) > EXACT
