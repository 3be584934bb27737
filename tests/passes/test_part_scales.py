"""part_scales: known scales become operands of their own; kernels of layers that are alike are one text; numbers stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import Recipe
from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.fx.graph import SPLICED, splice
from fp8compile.fx.rows_apart import FIRST_OF_ROWS
from fp8compile.passes.part_scales import part_scales
from fp8compile.recipe.context import Context

ROWS = 6


def place(row: int, column: int = 0, length: int = 1) -> Callable[[Tensor], Tensor]:
    def inv_scale(scales: Tensor) -> Tensor:
        return scales.narrow(0, row, length).narrow(1, column, 1)

    return inv_scale


def read(scale: Tensor) -> Tensor:
    return scale * 2


def graph_of(*taken: Callable[[Tensor], Tensor], returned: bool = False) -> GraphModule:
    """A graph whose passes took these parts of the scales, and read or only returned them."""
    with FakeTensorMode():
        value = torch.empty(ROWS, 4)
    graph = Graph()
    scales = graph.placeholder("scales")
    scales.meta["val"] = value
    out = graph.output(())
    made = [splice(graph, fn, scales, before=out) for fn in taken]
    out.args = (tuple(made if returned else [splice(graph, read, each, before=out) for each in made]),)
    return GraphModule({}, graph)


def parted(gm: GraphModule) -> GraphModule:
    part_scales(gm.graph, Context(Recipe()))
    gm.graph.lint()
    gm.recompile()
    return gm


def test_each_scale_is_taken_once_and_all_by_one_call() -> None:
    gm = parted(graph_of(place(4), place(1), place(4)))
    assert_expected_inline(
        gm.code.strip(),
        """\
def forward(self, scales):
    first_of_rows_default = torch.ops.fp8compile.first_of_rows.default(scales, [1, 4]);  scales = None
    getitem = first_of_rows_default[0]
    getitem_1 = first_of_rows_default[1];  first_of_rows_default = None
    mul = torch.ops.aten.mul.Tensor(getitem_1, 2)
    mul_1 = torch.ops.aten.mul.Tensor(getitem, 2);  getitem = None
    mul_2 = torch.ops.aten.mul.Tensor(getitem_1, 2);  getitem_1 = None
    return (mul, mul_1, mul_2)""",
    )
    scales = torch.randn(ROWS, 4)
    assert [x.item() for x in gm(scales)] == [scales[row, 0].item() * 2 for row in (4, 1, 4)]


def test_it_is_idempotent() -> None:
    gm = parted(graph_of(place(4), place(1)))
    before = gm.code
    assert parted(gm).code == before


@pytest.mark.parametrize("taken", [place(1, column=2), place(1, length=2)], ids=["another column", "two rows"])
def test_another_part_of_the_scales_is_left(taken: Callable[[Tensor], Tensor]) -> None:
    assert not _calls(parted(graph_of(taken)))


def test_what_is_only_returned_is_left() -> None:
    assert not _calls(parted(graph_of(place(1), returned=True)))


def test_what_the_user_takes_is_left() -> None:
    gm = graph_of(place(1))
    for node in gm.graph.nodes:
        node.meta.pop(SPLICED, None)
    assert not _calls(parted(gm))


def test_its_results_share_memory_with_the_scales() -> None:
    scales = torch.randn(ROWS, 4)
    first, second = FIRST_OF_ROWS(scales, [3, 0])
    assert first.shape == second.shape == (1, 1)
    assert first.data_ptr() == scales[3].data_ptr()
    assert second.data_ptr() == scales.data_ptr()


def test_generated_code_leaves_the_scales_as_they_are() -> None:
    """The last reader of a scale is followed by a buffer of the same size, which Inductor puts where memory is free."""

    def products(scales: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first, second = FIRST_OF_ROWS(scales, [0, 2])
        return (torch.mm(torch.mm(first, w), torch.mm(second, w)),)

    scales, w = torch.randn(ROWS, 4), torch.randn(1, 1)
    gm, before = make_fx(products, tracing_mode="fake")(scales, w), scales.clone()
    with mock.patch.object(torch._inductor.graph, "should_assume_input_aligned", return_value=True):  # as on a GPU
        (result,) = compile_fx_inner(gm, [scales, w])([scales, w])
    assert torch.equal(scales, before)
    assert torch.equal(result, products(scales, w)[0])


def test_it_runs_where_scales_are_delayed() -> None:
    gm = graph_of(place(1))
    ran = {
        scaling: part_scales.__name__
        in [
            each.name
            for each in passes_on(On.LOWERING, Situation(Context(Recipe(linears={"scaling": scaling})), gm.graph))
        ]
        for scaling in ("dynamic", "delayed")
    }
    assert ran == {"dynamic": False, "delayed": True}


def test_kernels_of_layers_that_are_alike_have_one_text() -> None:
    few, many = (_kernels(layers) for layers in (3, 5))
    assert 0 < few == many


def _kernels(layers: int) -> int:
    """Different kernels of the forward of so many blocks, generated for this CPU."""
    recipe = Recipe(linears={"mode": "tensorwise", "scaling": "delayed", "emulate": True}, saved="off", skip=())
    blocks = (nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(layers))
    model = torch.compile(nn.Sequential(*blocks), backend="fp8compile", options={"recipe": recipe})
    torch._dynamo.reset()
    written = mock.patch.object(AsyncCompile, "cpp_pybinding")  # the first step measures, node by node
    with torch._inductor.config.patch(fx_graph_cache=False), written:
        _, (forward, *_) = run_and_get_code(model, torch.randn(32, 64, requires_grad=True))
    return len(re.findall(r"^cpp_fused\w* = async_compile", forward, re.MULTILINE))


def _calls(gm: GraphModule) -> int:
    return sum(node.target is FIRST_OF_ROWS for node in gm.graph.nodes)
