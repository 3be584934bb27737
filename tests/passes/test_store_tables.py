"""store_tables: what a larger value reads of cosines and the like is stored; what is cheap, small, or no FP32 is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import _torch as private
from fp8compile.passes.store_tables import store_tables
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import text_of

SEQ, HEADS, WIDTH = 2048, 32, 128
Q = (1, HEADS, SEQ, WIDTH)
CAST = torch.ops.prims.convert_element_type.default
Fn = Callable[[Tensor, Tensor], Any]


def rotary(q: Tensor, angles: Tensor) -> tuple[Tensor]:
    """As Transformers writes it: the tables are made once, in FP32, and cast."""
    cos, sin = (CAST(table, q.dtype).unsqueeze(1) for table in (angles.cos(), angles.sin()))
    halves = torch.cat((-q[..., WIDTH // 2 :], q[..., : WIDTH // 2]), -1)
    return (q * cos + halves * sin,)


def traced(
    fn: Fn, q: tuple[int, ...] = Q, table: tuple[int, ...] = (1, SEQ, WIDTH), dtype: Any = None
) -> GraphModule:
    with FakeTensorMode():
        gm: GraphModule = make_fx(fn)(torch.empty(q, dtype=torch.bfloat16), torch.empty(table, dtype=dtype))
    return gm


def stored(gm: GraphModule, recipe: Recipe | None = None) -> list[str]:
    store_tables(gm.graph, Context(recipe or Recipe()))
    return [node.name for node in gm.graph.nodes if node.meta.get(private.STORED)]


def test_golden_both_tables_are_stored_before_their_casts() -> None:
    gm = traced(rotary)
    assert stored(gm) == ["cos", "sin"] == stored(gm), "and it is idempotent"
    assert_expected_inline(
        text_of(gm.graph),
        """\
q_1: bfloat16[1, 32, 2048, 128]
angles_1: float32[1, 2048, 128]
cos: float32[1, 2048, 128] = cos(angles_1)
sin: float32[1, 2048, 128] = sin(angles_1)
convert_element_type: bfloat16[1, 2048, 128] = convert_element_type(cos, torch.bfloat16)
unsqueeze: bfloat16[1, 1, 2048, 128] = unsqueeze(convert_element_type)
convert_element_type_1: bfloat16[1, 2048, 128] = convert_element_type(sin, torch.bfloat16)
unsqueeze_1: bfloat16[1, 1, 2048, 128] = unsqueeze(convert_element_type_1)
slice_1: bfloat16[1, 32, 2048, 64] = slice(q_1)
neg: bfloat16[1, 32, 2048, 64] = neg(slice_1)
slice_2: bfloat16[1, 32, 2048, 64] = slice(q_1)
cat: bfloat16[1, 32, 2048, 128] = cat()
mul: bfloat16[1, 32, 2048, 128] = mul(q_1, unsqueeze)
mul_1: bfloat16[1, 32, 2048, 128] = mul(cat, unsqueeze_1)
add: bfloat16[1, 32, 2048, 128] = add(mul, mul_1)
return add
""",
    )


def scaled(op: Callable[[Tensor], Tensor]) -> Fn:
    return lambda q, table: (q * op(table).unsqueeze(1),)


def of_cosines(fn: Fn) -> Fn:
    return lambda q, table: fn(q, table.cos())


@pytest.mark.parametrize(
    ("why", "make"),
    [
        ("cheap to compute", lambda: traced(scaled(torch.exp), (8, HEADS, SEQ, WIDTH))),
        ("a number for each row", lambda: traced(lambda q, t: (q * t.pow(3)[:, None],), table=(1, SEQ, 1))),
        ("storing it would round it", lambda: traced(rotary, dtype=torch.bfloat16)),
        ("too few elements read it", lambda: traced(rotary, (1, HEADS, 16, WIDTH), (1, 16, WIDTH))),
        ("no larger value reads it", lambda: traced(lambda q, t: (t.cos() * q[:, 0].float(),))),
        ("not far larger", lambda: traced(rotary, (1, 4, 8 * SEQ, WIDTH), (1, 8 * SEQ, WIDTH))),
        ("it is returned", lambda: traced(of_cosines(lambda q, cos: (q * cos[:, None], cos)))),
        ("a matmul reads it", lambda: traced(of_cosines(lambda q, cos: (q * cos[:, None], cos[0] @ cos[0].mT)))),
        ("sums are no pointwise readers", lambda: traced(lambda q, t: (t.cos().sum(-1)[:, None, :, None] * q,))),
    ],
)
def test_it_declines(why: str, make: Callable[[], GraphModule]) -> None:
    assert not stored(make()), why


def test_the_preset_off_is_left_alone() -> None:
    assert not stored(traced(rotary), Recipe.preset("off"))


def test_elements_count_once_for_each_reader_and_once_for_a_diamond() -> None:
    """0.7 us for each reader: three are not worth a kernel of 2.6 us, four are; two ways to one of them are one."""
    elements = 875_000 // (HEADS * WIDTH)  # of 20 instructions each

    def fn(readers: int) -> Fn:
        def run(q: Tensor, table: Tensor) -> tuple[Tensor, ...]:
            cos = table.cos()[:, None]
            return (q * (cos.neg() + cos.abs()), *(q + i * cos for i in range(1, readers)))

        return run

    found = [stored(traced(fn(n), (1, HEADS, elements, WIDTH), (1, elements, WIDTH))) for n in (3, 4)]
    assert found == [[], ["cos"]]


def test_numbers_are_those_of_inductor_without_it() -> None:
    q, angles = torch.randn(1, HEADS, 1024, WIDTH, dtype=torch.bfloat16), torch.randn(1, 1024, WIDTH)

    def store(graph: Graph) -> None:
        store_tables(graph, Context(Recipe()))
        assert sum(node.meta.get(private.STORED, False) for node in graph.nodes) == 2

    found = []
    for options in ({}, {"post_grad_custom_post_pass": store}):
        torch._dynamo.reset()
        result, code = run_and_get_code(torch.compile(rotary, options=options), q, angles)
        found.append((result[0], "".join(code)))
    (plain, without), (ours, code_of_ours) = found
    assert torch.equal(plain, ours) and without != code_of_ours
