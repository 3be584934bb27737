"""call_codecs: on a CPU each encode and decode of groups is one call; what has no memory of its own, is large, or stands
elsewhere is arithmetic as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.fx.graph import splice
from fp8compile.fx.tracing import CODEC_CALL
from fp8compile.numerics import E4M3, E5M2, INT8, Groupwise, Rowwise, Tensorwise
from fp8compile.numerics.scaling import E8M0
from fp8compile.passes.call_codecs import LARGEST, call_codecs
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.measure import compiled

aten = torch.ops.aten
SHAPE = (8, 256)
CODECS: list[Any] = [Groupwise(INT8), Groupwise(E4M3, 96), Tensorwise(E4M3), Tensorwise(E5M2), Rowwise(E4M3)]
Fn = Callable[..., Any]


def graph_of(
    *fns: Fn, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> GraphModule:
    """A graph in which each function of an input of its own is spliced, as passes do it."""
    graph, results, mode = Graph(), list[Node](), FakeTensorMode()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(fns))]
    for given in inputs:
        with mode:
            given.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
    out = graph.output(())
    for fn, given in zip(fns, inputs, strict=True):
        made = splice(graph, fn, given, before=out)
        results += made if isinstance(made, tuple) else (made,)
    out.args = (tuple(results),)
    return GraphModule({}, graph)


def called(gm: GraphModule) -> list[str]:
    """The calls in a graph behind the pass."""
    call_codecs(gm.graph, Context(Recipe()))
    gm.graph.lint()
    return [n.target._opname for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fp8compile"]


def encode(codec: Any) -> Fn:
    return lambda x: codec.encode(x)


def there_and_back(codec: Any) -> Fn:
    """Behind the decode stands what the user computes, which no pass has put there."""

    def encode_and_decode(x: Tensor) -> Tensor:
        found: Tensor = codec.decode(*codec.encode(x), x.dtype)
        return found

    return encode_and_decode


def several(fn: Fn, **options: Any) -> GraphModule:
    """So many that none is large beside the others."""
    return graph_of(*[fn] * LARGEST, **options)


def test_golden() -> None:
    gm = several(there_and_back(Groupwise(INT8)))
    called(gm)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"][:4]
    assert_expected_inline(
        "\n".join(f"{n.name} = {n.target}{n.args}" for n in calls),
        """\
groups_encoded_default = fp8compile.groups_encoded.default(x0, torch.int8, torch.bfloat16, False, 8, 256, 128)
getitem = <built-in function getitem>(groups_encoded_default, 0)
getitem_1 = <built-in function getitem>(groups_encoded_default, 1)
groups_decoded_default = fp8compile.groups_decoded.default(getitem, getitem_1, torch.bfloat16, 8, 256, 128)""",
    )


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_one_call_for_each_and_once_more_changes_nothing(codec: Any) -> None:
    gm = several(there_and_back(codec))
    assert called(gm) == ["groups_encoded", "groups_decoded"] * LARGEST
    assert not [n for n in gm.graph.nodes if n.target in (aten.mul.Tensor, aten.amax.default, aten.abs.default)]
    before = str(gm.graph)
    called(gm)
    assert str(gm.graph) == before


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SHAPE, (2, 50, 257), (3, 5, 7, 24)])
def test_the_numbers_are_those_of_before(codec: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * torch.logspace(-4, 4, shape[-1])).to(dtype)
    x[1, 0], x[0, 1] = torch.nan, torch.inf
    for fn in (encode(codec), there_and_back(codec)):
        plain, gm = (several(fn, shape=shape, dtype=dtype) for _ in range(2))
        assert called(gm)
        ours, before = (Interpreter(each).run(*[x] * LARGEST) for each in (gm, plain))
        for a, b in zip(ours, before, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            whole = torch.uint8 if a.element_size() == 1 else a.dtype
            if codec.format is not INT8 or a.dtype != torch.int8:
                assert torch.equal(a.view(whole).nan_to_num(), b.view(whole).nan_to_num())


def test_codes_that_are_read_beside_their_amax() -> None:
    """Saved for the backward may be the amax, of which it makes the scale again."""

    gm = several(encode(Tensorwise(E4M3)))
    amaxes = [n for n in gm.graph.nodes if n.target is aten.amax.default and not n.meta["val"].dim()]
    out = gm.graph.output_node()
    out.args = ((*out.args[0], *amaxes),)  # type: ignore[misc]
    x = torch.randn(SHAPE).bfloat16()
    expected = x.abs().amax()
    assert called(gm) == ["groups_encoded"] * LARGEST
    assert all(torch.equal(found, expected) for found in Interpreter(gm).run(*[x] * LARGEST)[-LARGEST:])


DECLINED: dict[str, tuple[Fn, dict[str, Any]]] = {
    "on a GPU": (encode(Groupwise()), {"device": "cuda"}),
    "FP16": (encode(Groupwise()), {"dtype": torch.float16}),
    "scales of another kind": (encode(Groupwise(scale_dtype=E8M0)), {}),
    "a value that codecs make": (lambda x: Groupwise().encode(x.float() - x.float().mean(1, keepdim=True)), {}),
    "a value that codecs use": (lambda x: there_and_back(Groupwise())(x) + 1, {}),
    "a known amax": (lambda x: Tensorwise(E4M3).encode(x, x.abs().amax()), {}),
    "scales of columns": (
        lambda x: Rowwise(E4M3).decode(x.to(E4M3.dtype), x.float()[:1], x.dtype),
        {"shape": (256, 256)},
    ),
    "in another order": (lambda x: Rowwise(E4M3).encode(x.t()), {}),
    "no codec": (lambda x: (x / x.abs().amax()).round(), {}),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declines(name: str) -> None:
    fn, options = DECLINED[name]
    gm = several(fn, **options)
    before = str(gm.graph)
    assert set(called(gm)) <= {"groups_encoded"} and (name == "a value that codecs use" or str(gm.graph) == before)
    assert "groups_decoded" not in called(gm)


INSIDE = {
    "what is rounded": (encode(Groupwise(INT8)), aten.round.default),
    "a scale's reciprocal": (encode(Tensorwise(E4M3)), aten.reciprocal.default),
    "a scale that is not bounded": (encode(Rowwise(E4M3)), aten.mul.Tensor),
    "codes as numbers": (there_and_back(Rowwise(E4M3)), torch.ops.prims.convert_element_type.default),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_read_inside_a_call_stays(name: str) -> None:
    """A value that no call returns, read from outside, as a cut may save it: the call stays as it is written."""
    fn, target = INSIDE[name]
    gm = graph_of(*[fn] * (LARGEST + 1), dtype=torch.float32)
    inner = gm.graph.find_nodes(op="call_function", target=target)
    if "numbers" in name:
        inner = [n for n in inner if n.args[0].meta["val"].dtype == torch.float8_e4m3fn]
    out = gm.graph.output_node()
    results = list(out.args[0])  # type: ignore[arg-type]
    results[1:1] = [inner[0]]
    if "scale" in name:  # it alone is read, in the scale's place
        del results[2]
    out.args = (tuple(results),)
    expected = Interpreter(gm).run(*[torch.ones(SHAPE)] * (LARGEST + 1))
    calls = called(gm)
    assert len(calls) == len(called(graph_of(*[fn] * (LARGEST + 1), dtype=torch.float32))) - 1
    found = Interpreter(gm).run(*[torch.ones(SHAPE)] * (LARGEST + 1))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def test_what_was_saved_of_a_call_is_an_input_of_the_backward() -> None:
    """Its meta says which call made it, and it is none of this graph's operations."""
    gm = several(there_and_back(Groupwise(INT8)))
    call = next(n.meta[CODEC_CALL] for n in gm.graph.nodes if n.target is aten.amax.default)
    for given in gm.graph.find_nodes(op="placeholder"):
        given.meta[CODEC_CALL] = call
    assert called(gm) == ["groups_encoded", "groups_decoded"] * LARGEST
    assert len(gm.graph.find_nodes(op="placeholder")) == LARGEST


def test_what_a_compiler_cannot_do_is_said_before_a_graph_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = several(encode(Groupwise(INT8)))
    before = str(gm.graph)
    monkeypatch.setattr("fp8compile.passes.call_codecs.compiled", mock.Mock(side_effect=RuntimeError("no compiler")))
    with pytest.raises(RuntimeError, match="no compiler"):
        called(gm)
    assert str(gm.graph) == before


def test_the_largest_stay() -> None:
    """Logits, as a rule: decoded as a whole they would be the peak."""
    assert called(graph_of(encode(Groupwise()))) == []
    assert called(graph_of(*[encode(Groupwise())] * (LARGEST - 1))) == []


def test_it_runs_on_a_cpu_where_code_is_generated() -> None:
    for device, recipe, runs in (
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cpu", {"linears": "off", "saved": "off"}, False),
    ):
        graph = graph_of(encode(Groupwise()), device=device).graph
        names = [each.name for each in passes_on(On.LOWERING, Situation(Context(Recipe(**recipe)), graph))]
        assert ("call_codecs" in names) is runs, (device, recipe)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)) ** 2)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    found = [p.grad.double() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_gradients_are_as_good_as_those_of_arithmetic_that_is_generated() -> None:
    """A call reads what is in memory, rounded; a kernel what it has computed: so the last bits differ, and no more."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(2)]).bfloat16(), torch.randn(96, 64).bfloat16()
    exact = gradients(copy.deepcopy(model).double(), x.double())
    decibels = []
    for disabled in ("", "call_codecs"):
        torch._dynamo.reset()
        with torch._inductor.config.patch(disabled_passes=disabled):
            options = {"saved.min_numel": 0, "linears.emulate": True, "debug.codegen": "inductor"}
            found = gradients(compiled(model, **options), x)
        decibels.append([20 * torch.log10(a.norm() / (a - b).norm()) for a, b in zip(exact, found, strict=True)])
    by_call, written = map(torch.tensor, decibels)
    assert (by_call > written - 1.0).all() and by_call.min() > 12.0
