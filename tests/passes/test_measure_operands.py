"""measure_operands: every operand under a known scale is measured once, where it is encoded, and told of in order."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile._version import release_of
from fp8compile.fx.graph import SPLICED
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.linears import slot
from fp8compile.linears.known_scales import OPERAND
from fp8compile.passes.measure_operands import measure_operands
from fp8compile.recipe.context import Context, ScaleInput
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Notes
from tests.support.graphs import backward_of, forward_of, split_of
from tests.support.measure import compiled

DELAYED = {"linears.emulate": True, "saved": "off", "linears.scaling": "delayed"}


class Two(nn.Module):
    """q and k read one encoding of x."""

    def __init__(self, grad: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x)


def split(model: nn.Module | None = None) -> PartitionedGraph:
    torch.manual_seed(0)
    return split_of(model or nn.Linear(64, 16, bias=False), torch.randn(32, 64, requires_grad=True), **DELAYED)


@functools.cache
def halves() -> tuple[str, str]:
    """The text of forward and backward."""
    made = split()
    return forward_of(made), backward_of(made)


@pytest.mark.skipif(release_of(torch.__version__) >= (2, 15), reason="torch 2.15 lists a constant in the forward")
def test_golden_forward() -> None:
    assert_expected_inline(
        halves()[0],
        """\
primals_1: float32[16, 64]
primals_2: float32[32, 64]
primals_3: float32[134, 4]
slice_6: float32[1, 1] = inv_scale(primals_3)
view_4: float32[] = encode(tangents_1, slice_6)
slice_4: float32[1, 1] = inv_scale(primals_3)
view_2: float32[] = encode(primals_1, slice_4)
reciprocal_1: float32[] = encode(primals_1, slice_4)
sum_1: float32[16] = partials(primals_1, reciprocal_1)
sum_2: float32[16] = partials(primals_1, reciprocal_1)
amax: float32[16] = partials(primals_1, reciprocal_1)
convert_element_type_2: float8_e4m3fn[16, 64] = encode(primals_1, slice_4)
clamp_max_3: float32[16, 64] = decode(convert_element_type_2, slice_4)
slice_2: float32[1, 1] = inv_scale(primals_3)
view: float32[] = encode(primals_2, slice_2)
reciprocal: float32[] = encode(primals_2, slice_2)
sum_3: float32[32] = partials(primals_2, reciprocal)
sum_4: float32[32] = partials(primals_2, reciprocal)
amax_1: float32[32] = partials(primals_2, reciprocal)
convert_element_type: float8_e4m3fn[32, 64] = encode(primals_2, slice_2)
clamp_max_1: float32[32, 64] = decode(convert_element_type, slice_2)
permute_5: float32[64, 16] = permute(clamp_max_3)
mm: float32[32, 16] = mm(clamp_max_1, permute_5)
cat_2: float32[2, 4] = totals(amax, sum_1, sum_2, amax_1, sum_3, sum_4)
return mm, cat_2, primals_1, view_4, view_2, view, convert_element_type
""",
    )


def test_golden_backward() -> None:
    """Its lines that have to do with statistics."""
    about = ("partials", "totals", "gradient", "return", "operand_statistics")
    lines = [line for line in halves()[1].splitlines() if any(word in line for word in about)]
    assert_expected_inline(
        "\n".join(lines),
        """\
operand_statistics: float32[2, 4]
sum_1: float32[32] = partials(tangents_1, reciprocal_2)
sum_2: float32[32] = partials(tangents_1, reciprocal_2)
amax: float32[32] = partials(tangents_1, reciprocal_2)
where_7: float32[1, 4] = totals(amax, sum_1, sum_2)
add: float32[134, 4] = gradient(operand_statistics, where_7)
return mm_1, mm_2, add""",
    )


def operands_of(model: nn.Module, **changes: object) -> dict[str, tuple[str, int, int]]:
    compiled(model, **DELAYED | changes)(torch.randn(32, 64)).sum().backward()
    return {o.label: (o.format, o.row, o.place) for o in fp8compile.report(model).notes.operands}


def test_each_operand_once_the_shared_one_by_its_first_linear() -> None:
    half = slot.OPERANDS * 3 + slot.SPARE  # calls: two linears and their product
    assert operands_of(Two()) == {
        "q.input": ("e4m3", 0, 0),
        "q.weight": ("e4m3", 1, 1),
        "k.weight": ("e4m3", 2, 2),
        "k.gradient": ("e5m2", half, half),
        "q.gradient": ("e5m2", half + 1, half + 1),
    }


def test_only_modules_whose_recipe_asks_for_it() -> None:
    found = operands_of(Two(), modules={"k": {"linears.scaling": "dynamic"}})
    assert sorted(found) == ["q.gradient", "q.input", "q.weight"]


def test_when_rows_run_out_the_rest_takes_its_own_scales_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "OPERANDS", 0)
    monkeypatch.setattr(slot, "SPARE", 1)
    model = Two()
    assert sorted(operands_of(model)) == ["k.gradient", "q.input"]
    told = {(linear.origin.module, linear.direction): linear.formats for linear in fp8compile.report(model).linears}
    assert told["k", "wgrad"] == "e5m2 x e4m3 delayed, emulated"
    assert told["q", "forward"] == "e4m3 x e4m3 tensorwise, emulated"


def test_a_second_run_finds_nothing_to_do() -> None:
    made = split()
    ctx = Context(Recipe(**DELAYED), scale_input=ScaleInput(2, 136, True, ()))  # type: ignore[arg-type]
    before = backward_of(made)
    assert measure_operands(made, ctx) == Notes() and backward_of(made) == before


def test_a_graph_without_known_scales_is_left() -> None:
    made = split_of(
        nn.Linear(64, 16), torch.randn(32, 64, requires_grad=True), saved="off", **{"linears.emulate": True}
    )
    assert not any(OPERAND in node.meta for node in made.fw.graph.nodes)
    assert measure_operands(made, Context(Recipe())) == Notes()


def test_what_is_saved_for_it_is_sixteen_bytes_an_operand() -> None:
    one, other = (
        split_of(Two(), torch.randn(32, 64, requires_grad=True), **DELAYED | changes).saved_bytes()
        for changes in ({}, {"linears.scaling": "dynamic"})
    )
    scales = 16 * 2 * (slot.OPERANDS * 3 + slot.SPARE)  # they come in, and may be saved as a whole
    assert one - other <= 16 * 3 + scales


class Gated(nn.Module):
    """Both factors of down's input are stored; its own statistics are taken in their groups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def test_what_is_made_from_stored_values_is_measured_in_their_groups() -> None:
    made = split_of(Gated(), torch.randn(32, 64), **DELAYED | {"saved": "auto"})
    in_groups = [n for n in made.fw.graph.nodes if str(n.meta.get(SPLICED, "")).startswith("groups(")]
    assert [n.meta["val"].numel() for n in in_groups] == [32 * 256] and in_groups[0].meta["val"].shape[-1] == 128
    found = []
    for saved in ("auto", "off"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Gated()
        compiled(model, **DELAYED | {"saved": saved, "saved.min_numel": 0})(torch.randn(32, 64)).sum().backward()
        ((labels, each),) = fp8compile.tools.scaling_state(model).graphs
        found.append(
            dict(zip(labels, zip(each.amaxes[:, 0].tolist(), each.totals.tolist(), strict=True), strict=True))
        )
    (one, _), (other, _) = (each["down.input"] for each in found)
    assert one == other > 0 and found[0].keys() == found[1].keys()


def test_the_statistics_are_those_of_what_was_encoded() -> None:
    """The amax of x and of the weights, exactly; the gradient's, from the loss."""
    torch.manual_seed(0)
    model, x = Two(), torch.randn(32, 64)
    out = compiled(model, **DELAYED)(x)
    out.backward(torch.full_like(out, 3.0))
    (graph,) = fp8compile.tools.scaling_state(model).state_dict()["graphs"]
    found = dict(zip(graph["operands"], graph["amaxes"][:, 0].tolist(), strict=True))
    assert found["q.input"] == float(x.abs().max())
    assert found["q.weight"] == float(model.q.weight.detach().abs().max())
    assert found["k.weight"] == float(model.k.weight.detach().abs().max())
    assert found["k.gradient"] == pytest.approx(3 * float(model.q(x).detach().abs().max()), rel=0.1)
