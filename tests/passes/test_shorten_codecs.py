"""shorten_codecs: arithmetic of codecs in a GPU's short forms; the user's, a CPU's and what is not alike is left.

That generated kernels with them compute what the graph does is in tests/sm90, with their instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter

from fp8compile import _torch as private
from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.fx.graph import splice
from fp8compile.numerics.codecs import Groupwise, Tensorwise
from fp8compile.numerics.formats import E4M3, E5M2, INT8, Format
from fp8compile.numerics.scaling import E8M0, SMALLEST_INV_SCALE, exact_inv_scale
from fp8compile.passes.shorten_codecs import shorten_codecs
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe

aten = torch.ops.aten
SHAPE = (8, 256)
OTHER = dataclasses.replace(E4M3, max=240.0)
CODECS = [Tensorwise(E4M3), Tensorwise(E5M2), Groupwise(E4M3), Groupwise(INT8)]


def graph_of(fn: Callable[..., Any], device: str, dtype: torch.dtype = torch.bfloat16) -> GraphModule:
    """A graph in which ``fn`` of one tensor is spliced, as passes do it."""
    with FakeTensorMode():
        x = torch.empty(SHAPE, dtype=dtype, device=device)
    graph = Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    out = graph.output(())
    made = splice(graph, fn, given, before=out)
    out.args = (made if isinstance(made, tuple) else (made,),)
    return GraphModule({}, graph)


def shortened(gm: GraphModule) -> list[str]:
    """The short forms that stand in a graph behind the pass."""
    shorten_codecs(gm.graph, Context(Recipe()))
    gm.graph.lint()
    return [n.target.name() for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fp8compile"]


def on_a_cpu(gm: GraphModule) -> GraphModule:
    for node in gm.graph.nodes:
        node.kwargs = {
            name: torch.device("cpu") if name == "device" else value for name, value in node.kwargs.items()
        }
    return gm


def there_and_back(codec: Any) -> Callable[[Tensor], Tensor]:
    def encode_and_decode(x: Tensor) -> Tensor:
        found: Tensor = codec.decode(*codec.encode(x), x.dtype)
        return found

    return encode_and_decode


def test_golden_a_codec_of_groups() -> None:
    gm = graph_of(there_and_back(Groupwise(INT8)), "cuda")
    shortened(gm)
    calls = (node for node in gm.graph.nodes if node.op == "call_function")
    assert_expected_inline(
        "\n".join(f"{n.name} = {n.target}{n.args}" for n in calls),
        """\
view = aten.view.default(x, [16, 128])
magnitude_bits = fp8compile.magnitude_bits.default(view,)
amax_1 = aten.amax.default(magnitude_bits, [-1], True)
amax = fp8compile.magnitudes.default(amax_1, torch.bfloat16)
where = fp8compile.inv_scale.default(amax, torch.int8, torch.bfloat16)
convert_element_type_2 = fp8compile.quantized.default(view, where, torch.int8)
view_4 = aten.view.default(convert_element_type_2, [8, 256])
convert_element_type_3 = prims.convert_element_type.default(where, torch.bfloat16)
view_5 = aten.view.default(view_4, [16, 128])
convert_element_type_4 = prims.convert_element_type.default(view_5, torch.float32)
convert_element_type_5 = prims.convert_element_type.default(convert_element_type_3, torch.float32)
mul_2 = aten.mul.Tensor(convert_element_type_4, convert_element_type_5)
clamp_max_1 = fp8compile.within.default(mul_2, 3.3895313892515355e+38)
convert_element_type_6 = prims.convert_element_type.default(clamp_max_1, torch.bfloat16)
view_7 = aten.view.default(convert_element_type_6, [8, 256])""",
    )


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_an_encode_and_a_decode_take_a_form_of_each_kind(codec: Any) -> None:
    gm = graph_of(there_and_back(codec), "cuda")
    assert sorted(shortened(gm)) == [
        "fp8compile::inv_scale",
        "fp8compile::magnitude_bits",
        "fp8compile::magnitudes",
        "fp8compile::quantized",
        "fp8compile::within",
    ]
    left = {node.target for node in gm.graph.nodes}
    assert not left & {aten.round.default, aten.clamp_max.default, aten.abs.default, aten.reciprocal.default}
    before = str(gm.graph)
    shortened(gm)
    assert str(gm.graph) == before  # once more changes nothing


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_numbers_are_those_of_before(codec: Any, dtype: torch.dtype) -> None:
    """The graph's own operators, run here, where each is torch's function."""
    plain, short = (graph_of(there_and_back(codec), "cuda", dtype) for _ in range(2))
    assert shortened(short)
    x = torch.randn(SHAPE) * torch.logspace(-4, 4, SHAPE[1])
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    found, expected = (Interpreter(on_a_cpu(gm)).run(x.to(dtype))[0] for gm in (short, plain))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_codes_keep_their_name_and_what_is_known_of_them() -> None:
    gm = graph_of(lambda x: Tensorwise(E4M3).encode(x)[0], "cuda")
    (codes,) = gm.graph.output_node().args[0]
    codes.meta["known"] = True
    name = codes.name
    shortened(gm)
    (after,) = gm.graph.output_node().args[0]
    assert (after.name, after.meta["known"], after.target.name()) == (name, True, "fp8compile::quantized")


DECLINED: dict[str, Callable[[Tensor], Any]] = {
    "other limits": lambda x: x.float().clamp(-100.0, 100.5),
    "one limit": lambda x: x.float().clamp(max=448.0),
    "in float64": lambda x: x.double().clamp(-448.0, 448.0),
    "a limit below zero": lambda x: x.float().clamp(1.0, -1.0),
    "the largest, not of magnitudes": lambda x: x.amax(1),
    "integers": lambda x: x.to(torch.int32).abs().amax(1),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_not_alike_is_left(what: str) -> None:
    assert not shortened(graph_of(DECLINED[what], "cuda"))


@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=lambda fmt: fmt.name)
def test_codes_of_other_limits_are_held_first(fmt: Format) -> None:
    """A conversion saturates at its format's limit, not at another."""
    gm = graph_of(lambda x: x.float().round().clamp(-100.0, 100.0).to(fmt.dtype), "cuda")
    assert shortened(gm) == ["fp8compile::within"]


def test_integers_that_are_not_rounded_to_nearest_are_left() -> None:
    gm = graph_of(lambda x: x.float().floor().clamp(-127.0, 127.0).to(torch.int8), "cuda")
    assert shortened(gm) == ["fp8compile::within"]


def test_a_clamp_that_others_read_stays_for_them() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        held = x.float().clamp(-448.0, 448.0)
        return held.to(torch.float8_e4m3fn), held

    assert sorted(shortened(graph_of(both, "cuda"))) == ["fp8compile::codes_of", "fp8compile::within"]


def runs_on(device: str, recipe: Recipe) -> bool:
    """Whether the pipeline has the pass for a graph."""
    graph = graph_of(there_and_back(Groupwise(INT8)), device).graph
    return "shorten_codecs" in [each.name for each in passes_on(On.LOWERING, Situation(Context(recipe), graph))]


def test_on_a_cpu_and_under_off_nothing_is_rewritten() -> None:
    assert runs_on("cuda", Recipe()) and not runs_on("cpu", Recipe()) and not runs_on("cuda", Recipe.preset("off"))
    assert not shortened(graph_of(there_and_back(Groupwise(INT8)), "cpu"))


def test_the_user_s_own_arithmetic_is_left() -> None:
    trace = private.make_fx(there_and_back(Groupwise(INT8)), decomposition_table=private.select_decomp_table())
    with FakeTensorMode():
        gm = trace(torch.empty(SHAPE, device="cuda"))
    assert not shortened(gm)


def test_other_gpus_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not runs_on("cuda", Recipe())


def test_a_recipe_s_groups_of_any_size_are_shortened() -> None:
    codec = dataclasses.replace(Groupwise(INT8), group_size=64)
    assert "fp8compile::quantized" in shortened(graph_of(there_and_back(codec), "cuda"))


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda fmt: fmt.name)
def test_a_scale_is_one_node_of_its_format_and_its_own_dtype(fmt: Format, scale: torch.dtype) -> None:
    gm = graph_of(lambda x: exact_inv_scale(x.abs().amax(), fmt, scale), "cuda")
    shortened(gm)
    (found,) = gm.graph.output_node().args[0]
    assert (found.target.name(), found.args[1:]) == ("fp8compile::inv_scale", (fmt.dtype, scale))


NO_SCALE: dict[str, Callable[[Tensor], Tensor]] = {
    "a power of two": lambda x: exact_inv_scale(x.abs().amax(), E4M3, E8M0),
    "of another format's largest": lambda x: exact_inv_scale(x.abs().amax(), OTHER, torch.float32),
    "not bounded": lambda x: torch.where(x.float() < torch.inf, x.float() * (1 / 448.0), torch.nan),
    "bounded elsewhere": lambda x: torch.where(
        x.float() < torch.inf, (x.float() * (1 / 448.0)).clamp_min(2.0**-100), torch.nan
    ),
    "finite below another limit": lambda x: torch.where(
        x.float() < 1e30, (x.float() * (1 / 448.0)).clamp_min(SMALLEST_INV_SCALE), torch.nan
    ),
    "infinite, not NaN": lambda x: torch.where(
        x.float() < torch.inf, (x.float() * (1 / 448.0)).clamp_min(SMALLEST_INV_SCALE), torch.inf
    ),
    "of another amax": lambda x: torch.where(
        x.float() < torch.inf, (x.flip(0).float() * (1 / 448.0)).clamp_min(SMALLEST_INV_SCALE), torch.nan
    ),
}


@pytest.mark.parametrize("what", NO_SCALE)
def test_what_is_no_scale_of_ours_is_left(what: str) -> None:
    assert "fp8compile::inv_scale" not in shortened(graph_of(NO_SCALE[what], "cuda"))


def test_what_is_multiplied_with_another_number_is_no_code_of_it() -> None:
    """Only a reciprocal that broadcasts: else the first factor would have to be the larger one."""
    gm = graph_of(lambda x: (x.float() * x.float().amax()).clamp(-448.0, 448.0).to(E4M3.dtype), "cuda")
    assert shortened(gm) == ["fp8compile::codes_of"]
    one_row = graph_of(
        lambda x: (x.float().amax(0) * x.float().reciprocal()).clamp(-448.0, 448.0).to(E4M3.dtype), "cuda"
    )
    assert "fp8compile::quantized" not in shortened(one_row)
