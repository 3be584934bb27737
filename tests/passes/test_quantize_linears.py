"""quantize_linears: what becomes a matmul of codes, what is shared, what is left and why, and the numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile.fx.graph import ENCODING, SPLICED, copy_graph
from fp8compile.numerics import E4M3, E5M2, Rowwise, Tensorwise
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled, llama_case, matmul_entries, why
from tests.support.reference import sqnr_db

E4, E5 = Tensorwise(E4M3), Tensorwise(E5M2)


def linears_of(
    model: nn.Module, *args: Tensor, loss: Callable[..., Tensor] | None = None, **fields: object
) -> list[Linear | Skip]:
    recipe = Recipe(**{"linears.emulate": True, **fields})  # type: ignore[arg-type]
    return matmul_entries(fp8compile.explain(model, args, recipe=recipe, loss=loss))


def reason_of(model: nn.Module, *args: Tensor, **fields: object) -> str:
    """The one reason for which all matmuls of the model's only linear are left."""
    (reason,) = {why(x) for x in linears_of(model, *args, **fields)}
    return reason


def encodings(graph: Graph) -> list[str]:
    """What is encoded, one entry for each encoding."""
    return [n.meta[SPLICED] for n in graph.nodes if ENCODING in n.meta and n.meta["val"].element_size() == 1]


@functools.cache
def llama() -> tuple[Graph, list[Linear | Skip]]:
    """The joint graph of a layer, which no test changes, and what is told of its matmuls."""
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = joint_of(layer, *args, **{"linears.emulate": True})
    return graph, matmul_entries(fp8compile.report(layer))


def test_golden_joint_graph_of_a_linear() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    assert_expected_inline(
        text_of(joint_of(nn.Linear(64, 16, bias=False), x, **{"linears.emulate": True})),
        """\
primals_1: float32[16, 64]
primals_2: float32[32, 64]
tangents_1: float32[32, 16]
where_2: float32[] = encode(tangents_1)
convert_element_type_4: float8_e5m2[32, 16] = encode(tangents_1)
clamp_max_5: float32[32, 16] = decode(convert_element_type_4, where_2)
where_1: float32[] = encode(primals_1)
convert_element_type_2: float8_e4m3fn[16, 64] = encode(primals_1)
clamp_max_3: float32[16, 64] = decode(convert_element_type_2, where_1)
where: float32[] = encode(primals_2)
convert_element_type: float8_e4m3fn[32, 64] = encode(primals_2)
clamp_max_1: float32[32, 64] = decode(convert_element_type, where)
permute_5: float32[64, 16] = permute(clamp_max_3)
mm: float32[32, 16] = mm(clamp_max_1, permute_5)
permute_6: float32[16, 32] = permute(clamp_max_5)
mm_1: float32[16, 64] = mm(permute_6, clamp_max_1)
permute_7: float32[16, 64] = permute(permute_5)
mm_2: float32[32, 64] = mm(clamp_max_5, permute_7)
return mm, mm_1, mm_2
""",
    )


def test_golden_scaled_matmuls(fp8_units: None) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    assert_expected_inline(
        text_of(joint_of(nn.Linear(64, 16), x)),
        """\
primals_1: float32[16, 64]
primals_2: float32[16]
primals_3: float32[32, 64]
tangents_1: float32[32, 16]
where_2: float32[] = encode(tangents_1)
convert_element_type_2: float8_e5m2[32, 16] = encode(tangents_1)
as_strided_2: float8_e5m2[32, 16] = stored(convert_element_type_2)
where_1: float32[] = encode(primals_1)
convert_element_type_1: float8_e4m3fn[16, 64] = encode(primals_1)
as_strided_1: float8_e4m3fn[16, 64] = stored(convert_element_type_1)
where: float32[] = encode(primals_3)
convert_element_type: float8_e4m3fn[32, 64] = encode(primals_3)
permute_12: float8_e4m3fn[32, 64] = lay_out(convert_element_type)
as_strided: float8_e4m3fn[32, 64] = stored(convert_element_type)
permute_6: float8_e4m3fn[64, 16] = permute(as_strided_1)
permute_5: float8_e4m3fn[64, 16] = permute(convert_element_type_1)
add: float32[32, 16] = scaled_mm(as_strided, permute_6, where, where_1, primals_2)
permute_7: float8_e4m3fn[16, 64] = permute(permute_5)
permute_9: float8_e4m3fn[16, 64] = lay_out(permute_7)
_scaled_mm_1: float32[32, 64] = scaled_mm(as_strided_2, permute_9, where_2, where_1)
permute_10: float8_e5m2[16, 32] = permute(convert_element_type_2)
as_strided_4: float8_e5m2[16, 32] = lay_out(permute_10)
_scaled_mm_2: float32[16, 64] = scaled_mm(as_strided_4, permute_12, where_2, where)
sum_1: float32[1, 16] = sum.dim_IntList(tangents_1)
view: float32[16] = view(sum_1)
return add, _scaled_mm_2, view, _scaled_mm_1
""",
    )


def test_one_encoding_serves_all_uses_of_a_value() -> None:
    graph, _ = llama()
    # q, k and v read one norm output, gate and up the other; each of 7 weights and 7 gradients serves two matmuls.
    assert len(encodings(graph)) == len(set(encodings(graph))) == 4 + 7 + 7


def test_every_matmul_of_every_linear_is_rewritten() -> None:
    _, found = llama()
    names = ("q", "k", "v", "o", "gate", "up", "down")
    assert {(x.origin.module, x.direction) for x in found} == {
        (name, direction) for name in names for direction in ("forward", "dgrad", "wgrad")
    }
    assert len(found) == 21 and not any(why(x) for x in found)
    formats = {x.direction: x.formats for x in found if isinstance(x, Linear)}
    assert formats["forward"] == "e4m3 x e4m3 tensorwise, emulated"
    assert formats["dgrad"] == formats["wgrad"] == "e5m2 x e4m3 tensorwise, emulated"
    down = next(x for x in found if isinstance(x, Linear) and x.origin.module == "down")
    assert (down.M, down.K, down.N) == (128, 128, 64) and "self.down" in down.origin.source


def test_it_is_idempotent() -> None:
    shared, _ = llama()
    assert shared.owning_module is not None
    graph = copy_graph(shared.owning_module).graph
    before = len(graph.nodes)
    layer, args = llama_case(2, 64, 64, 128, 4)
    statics = frozenset(range(len(list(layer.parameters())) + len(args)))
    context = Context(Recipe(linears={"emulate": True}), statics)
    assert not quantize_linears(graph, context).linears
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


# ------------------------------------------------------------------------------------------------------ declines


class Head(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.projection = nn.Linear(64, 32, bias=False)
        if tied:
            self.projection.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.projection(self.embed(ids))


class Upcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(64, 64).bfloat16(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x).float())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


def test_reasons_to_leave_a_linear() -> None:
    x = torch.randn(32, 64)
    linear = nn.Sequential(nn.Linear(64, 64))
    named = nn.ModuleDict({"lm_head": nn.Linear(64, 64)})
    named.forward = lambda x: named["lm_head"](x)  # type: ignore[method-assign]
    assert reason_of(linear, x, **{"linears.emulate": False}).startswith("cpu has no FP8 matrix units")
    assert reason_of(nn.Sequential(nn.Linear(64, 24)), x) == "N=24 is not a multiple of 16"
    assert reason_of(nn.Sequential(nn.Linear(8, 64)), x[:, :8]) == "K=8 is not a multiple of 16"
    assert reason_of(linear, x[:0]) == "no rows"
    assert reason_of(linear.double(), x.double()) == "f64 is left alone"
    assert reason_of(Experts(), torch.randn(4, 16, 64)).startswith("a batched matmul of parameters")


def test_the_output_head_is_found_by_path_or_tied_weight() -> None:
    ids = torch.randint(32, (2, 16))
    assert reason_of(Head(tied=True), ids) == "output head: its weight is tied to an embedding"
    assert reason_of(Head(tied=False), ids) == "", "its place as the last layer says nothing"
    for field in ("linears.skip", "skip"):
        said = reason_of(Head(tied=False), ids, **{field: "projection"})
        assert said == f"Recipe.{field}: module 'projection' matches 'projection'"


def test_what_the_user_upcast_stays() -> None:
    reasons = {x.origin.module: why(x) for x in linears_of(Upcast(), torch.randn(32, 64).bfloat16())}
    assert reasons == {"low": "", "high": "upcast by the user"}


def rowwise_on_the_cpu() -> bool:
    """Whether this torch's _scaled_mm takes rowwise scales on a CPU, which stands for a device here (torch 2.11 does not)."""
    a, ones = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def test_rowwise_on_a_device_gives_bf16_only(fp8_units: None) -> None:
    fields = {"linears.emulate": False, "linears": "rowwise"}
    assert (
        reason_of(nn.Linear(64, 64), torch.randn(32, 64), **fields)
        == "_scaled_mm with rowwise scales gives BF16 only"
    )
    if not rowwise_on_the_cpu():
        pytest.skip("this torch's _scaled_mm on a CPU takes tensorwise scales only")
    assert reason_of(nn.Linear(64, 64).bfloat16(), torch.randn(32, 64).bfloat16(), **fields) == ""


def test_a_module_can_have_its_own_recipe() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    found = linears_of(model, torch.randn(32, 64), modules={"1": {"linears": "off"}})
    assert {(x.origin.module, why(x)) for x in found} == {
        ("0", ""),
        ("1", "Recipe.linears is off for module '1'"),
    }


def test_evaluation_is_left_as_it_is() -> None:
    x, model = torch.randn(32, 64), nn.Linear(64, 64)
    fn = compiled(model, **{"linears.emulate": True})
    with torch.no_grad():
        assert torch.equal(fn(x), model(x))
        report = fp8compile.explain(model, (x,), recipe=Recipe(linears={"emulate": True}))
    assert not report.linears and "nothing was rewritten" in report.remarks[0]
    assert not fp8compile.report(fn).linears


def test_attention_by_plain_matmuls_is_no_linear() -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.t()).softmax(-1) @ x

    model = nn.Module()
    model.forward = attend  # type: ignore[method-assign]
    assert not linears_of(model, torch.randn(32, 64, requires_grad=True))


# ------------------------------------------------------------------------------------------------------- numbers


def fake(codec: Tensorwise | Rowwise, x: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formats", ["hybrid", "e4m3"])
def test_emulation_is_the_matmul_of_decoded_operands_bit_for_bit(formats: str, dtype: torch.dtype) -> None:
    gradient = E5 if formats == "hybrid" else E4
    linear = nn.Linear(64, 32).to(dtype)
    x, dy = torch.randn(48, 64, dtype=dtype, requires_grad=True), torch.randn(48, 32, dtype=dtype)
    y = compiled(linear, saved="off", **{"linears.emulate": True, "linears.formats": formats})(x)
    dx, dw, db = torch.autograd.grad(y, (x, linear.weight, linear.bias), dy)
    x_hat, w_hat, dy_hat = fake(E4, x.detach()), fake(E4, linear.weight.detach()), fake(gradient, dy)
    assert torch.equal(y, F.linear(x_hat, w_hat, linear.bias))
    assert torch.equal(dx, dy_hat @ w_hat) and torch.equal(dw, dy_hat.t() @ x_hat)
    assert torch.equal(db, compiled_bias_gradient(linear, x, dy)), "the bias sees no codes"


def compiled_bias_gradient(linear: nn.Linear, x: Tensor, dy: Tensor) -> Tensor:
    (db,) = torch.autograd.grad(compiled(linear, preset="off")(x), linear.bias, dy)
    return db


def test_rowwise_scales_run_along_the_contracted_side() -> None:
    linear = nn.Linear(64, 32, bias=False)
    x, dy = torch.randn(48, 64, requires_grad=True), torch.randn(48, 32)
    y = compiled(linear, linears="rowwise", saved="off", **{"linears.emulate": True, "linears.formats": "e4m3"})(x)
    dx, dw = torch.autograd.grad(y, (x, linear.weight), dy)
    rows = Rowwise(E4M3)
    x_, w = x.detach(), linear.weight.detach()
    assert torch.equal(y, fake(rows, x_) @ fake(rows, w).t())
    assert torch.equal(dx, fake(rows, dy) @ fake(rows, w.t()).t())
    assert torch.equal(dw, fake(rows, dy.t()) @ fake(rows, x_.t()).t())


@pytest.mark.parametrize("fields", [{}, {"linears.formats": "e4m3"}, {"linears": "rowwise"}], ids=str)
@pytest.mark.parametrize("rows", [32, 40, 1])
def test_scaled_matmuls_are_the_emulated_ones_but_for_the_order_of_sums(
    fields: dict[str, str], rows: int, fp8_units: None
) -> None:
    """40 rows and 1 row: the wgrad's inner side is padded to a multiple of 16."""
    if "linears" in fields and not rowwise_on_the_cpu():
        pytest.skip("this torch's _scaled_mm on a CPU takes tensorwise scales only")
    linear = nn.Linear(64, 32).bfloat16()
    x, dy = torch.randn(rows, 64).bfloat16().requires_grad_(), torch.randn(rows, 32).bfloat16()
    results = []
    for emulate in (True, False):
        torch._dynamo.reset()
        fn = compiled(linear, saved="off", **fields, **{"linears.emulate": emulate})
        y = fn(x)
        results.append((y.detach(), *torch.autograd.grad(y, (x, linear.weight, linear.bias), dy)))
        assert all(("emulated" in p.formats) is emulate for p in fp8compile.report(fn).linears)
    # The emulated matmul rounds its decoded operands to BF16 first: 2**-9 an operand, so about 50 dB.
    for emulated, scaled in zip(*results, strict=True):
        assert sqnr_db(emulated, scaled) > 45


def test_what_only_matmuls_need_is_kept_as_their_codes() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    fn = compiled(nn.Linear(64, 64, bias=False), **{"linears.emulate": True, "saved.min_numel": 0})
    fn(x * 2)
    report = fp8compile.report(fn)
    (saved,) = report.saved
    assert saved.codec == "e4m3 tensorwise, a matmul's operand" and saved.bytes_before == 4 * saved.bytes_after
    assert report.saved_bytes == 64 * 64 + 2 * 4, "codes, and the scales of input and weight"
