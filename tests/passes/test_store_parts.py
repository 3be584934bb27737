"""store_parts: parts of a concatenation that are computed from the same tensors are stored one by one; numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.fx.graph import SPLICED
from fp8compile.fx.parts import JOINED
from fp8compile.passes.store_parts import store_parts
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import traced

ROWS, WIDTH = 32, 64


def gradient_of_a_split(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """As of ``gate, up = x.chunk(2, -1)``, read by a matmul."""
    return torch.cat([g * h, g.sin()], -1) @ w


def graph_of(fn: Callable[..., Tensor], device: str = "cuda", wide: int = 2 * WIDTH) -> GraphModule:
    return traced(fn, [(ROWS, WIDTH), (ROWS, WIDTH), (wide, 16)], torch.bfloat16, device)


def parted(gm: GraphModule) -> int:
    """How many concatenations are stored by parts behind the pass."""
    store_parts(gm.graph, Context(Recipe()))
    gm.graph.lint()
    gm.recompile()
    return len(gm.graph.find_nodes(op="call_function", target=JOINED))


def test_the_gradient_of_a_split_is_stored_by_parts() -> None:
    gm = graph_of(gradient_of_a_split)
    assert parted(gm) == 1
    assert_expected_inline(
        gm.code.strip(),
        """\
def forward(self, g_1, h_1, w_1) -> _Tensor_:
    mul = torch.ops.aten.mul.Tensor(g_1, h_1);  h_1 = None
    sin = torch.ops.aten.sin.default(g_1);  g_1 = None
    cat = torch.ops.fp8compile.joined.default([mul, sin], 1);  mul = sin = None
    mm = torch.ops.aten.mm.default(cat, w_1);  cat = w_1 = None
    return mm""",
    )


def test_numbers_and_a_second_run_stay() -> None:
    gm = graph_of(gradient_of_a_split)
    parted(gm)
    code, args = gm.code, [torch.randn(shape).bfloat16() for shape in ((ROWS, WIDTH), (ROWS, WIDTH), (2 * WIDTH, 16))]
    assert torch.equal(gm(*args), gradient_of_a_split(*args))
    assert parted(gm) == 1 and gm.code == code


def in_memory(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return torch.cat([g, h], -1) @ w


def apart(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return torch.cat([g.cos(), h.sin()], -1) @ w


def of_other_shapes(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return torch.cat([g * 2, g.narrow(1, 0, 32).sin(), g.narrow(1, 32, 32).cos()], -1) @ w


def read_by_itself(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    part = g * h
    return torch.cat([part, g.sin()], -1) @ w + part.sum()


def read_by_a_pointwise_operation(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    both = torch.cat([g * h, g.sin()], -1)
    return both.exp() @ w + (both @ w)


def read_by_a_sum(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    both = torch.cat([g * h, g.sin()], -1)
    return both.sum(0) @ w + (both @ w)


def of_one_part_twice(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    part = g * h
    return torch.cat([part, part], -1) @ w


@pytest.mark.parametrize(
    "fn",
    [
        *(in_memory, apart, of_other_shapes, read_by_itself, read_by_a_pointwise_operation, read_by_a_sum),
        of_one_part_twice,
    ],
)
def test_what_gains_nothing_is_left(fn: Callable[..., Tensor]) -> None:
    assert parted(graph_of(fn)) == 0


def test_parts_that_a_gpu_does_not_store_at_once_are_left() -> None:
    def narrow(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
        g, h = g.narrow(1, 0, 12), h.narrow(1, 0, 12)  # 24 bytes
        return torch.cat([g * h, g.sin()], -1) @ w

    assert parted(graph_of(narrow, wide=24)) == 0


def test_an_encode_reads_parts_that_are_stored() -> None:
    """It would compute all of them for the amax, and again for the codes."""
    gm = graph_of(read_by_a_sum)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.sum.dim_IntList:
            node.meta[SPLICED] = "encode(both)"
    assert parted(gm) == 1


@pytest.mark.parametrize(("device", "runs"), [("cuda", True), ("cpu", False)])
def test_it_runs_on_a_gpu_alone(device: str, runs: bool) -> None:
    with FakeTensorMode():
        value = torch.empty(4, 4, device=device)
    graph = Graph()
    graph.placeholder("x").meta["val"] = value
    ran = [each.name for each in passes_on(On.POST_GRAD, Situation(Context(Recipe()), graph))]
    assert (store_parts.__name__ in ran) == runs
