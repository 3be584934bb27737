"""What a graph only adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from fp8compile._torch import make_fx
from fp8compile.analysis.sums import Sum, sum_of

mm = torch.mm


def found(fn: Callable[..., Any]) -> tuple[Graph, Sum | None]:
    """The sum of all matmuls but those of the last operand."""
    x = torch.randn(4, 4)
    graph = make_fx(fn, tracing_mode="fake")(x, x + 1, x + 2).graph
    last = graph.find_nodes(op="placeholder")[-1]
    values = [n for n in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default) if last not in n.args]
    return graph, sum_of(values)


def names(nodes: Any) -> set[str]:
    return {node.name for node in nodes}


def test_a_chain_of_additions_through_reshapes_with_another_value_among_them() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ((mm(a, b).view(2, 2, 4) + c.view(2, 2, 4)) + mm(b, a).view(2, 2, 4)).relu()

    _, total = found(fn)
    assert total is not None and total.root.name == "add_1"
    assert names(total.others) == {"view_1"} and names(total.chain) == {"view"}
    assert names(total.inside) == {"view", "view_2", "add"}


def test_casts_are_looked_through() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return mm(a, b).to(torch.float64) + mm(b, b).to(torch.float64)

    _, total = found(fn)
    assert total is not None and not total.others and len(total.chain) == 1


def declines(fn: Callable[[Tensor, Tensor, Tensor], Any]) -> bool:
    return found(fn)[1] is None


def test_what_is_not_only_added_up() -> None:
    assert declines(lambda a, b, c: (mm(a, b) + (y := mm(b, a)), y)), "a value is read elsewhere"
    assert declines(lambda a, b, c: ((s := mm(a, b) + mm(b, b)) + mm(b, a), s)), "a partial sum is"
    assert declines(lambda a, b, c: mm(a, b) * 2 + mm(b, a)), "scaled"
    assert declines(lambda a, b, c: torch.add(mm(a, b), mm(b, a), alpha=2)), "scaled by the addition"
    assert declines(lambda a, b, c: mm(a, b)[:1] + mm(b, a)), "broadcast"
    assert declines(lambda a, b, c: mm(a, b).t() + mm(b, a)), "transposed"
    assert declines(lambda a, b, c: (mm(a, b), mm(b, a))), "no sum"


def test_a_value_twice_is_no_sum_of_two() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = mm(a, b)
        return (y + y) + mm(b, a)

    assert declines(fn)


def test_a_larger_sum_is_left_as_it_is() -> None:
    _, total = found(lambda a, b, c: (mm(a, b) + mm(b, a)) + c)
    assert total is not None and total.root.name == "add" and not total.others
