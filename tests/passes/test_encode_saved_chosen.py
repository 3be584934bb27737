"""encode_saved with bits chosen value by value: golden, contract, numbers, and where a choice is declined."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.passes.encode_saved import encode_saved
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.recipe.saved_bits import BITS, Choice, Key, SavedBits, SavedValue
from fp8compile.reporting.entries import RECIPE, SAVED
from fp8compile.saved.keys import NOT_SAVED, keys_of
from fp8compile.saved.plan import plan_saved
from tests.support.graphs import forward_of, split_of
from tests.support.measure import compiled, gradient_sqnr
from tests.support.net import Net, SwiGLU

ERROR = 0.0625
ADDS = "adds 6.2e-02 to the gradients' error"
OPTIONS: dict[str, Any] = {"saved.min_numel": 0, "linears": "off"}


class Twice(nn.Module):
    """Two values of one module and one operation: the first is read by a product, the second by silu's derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.inner(self.inner(x))))


def chosen(**formats: str) -> SavedBits:
    """The formats by module, each with the same error; of the values of ``SwiGLU``."""
    values = []
    for module, names in formats.items():
        of = names.split(",")
        for nth, name in enumerate(of):
            choices = tuple((each, Choice(0, 0.0 if each == "exact" else ERROR)) for each in BITS)
            values.append(SavedValue(Key(module, "addmm.default", "f32", nth, len(of)), 8192, choices, name))
    return SavedBits(tuple(values))


def codecs(model: nn.Module, bits: SavedBits, **options: Any) -> dict[str, str]:
    """By module, how its value is stored, or why it is not."""
    torch._dynamo.reset()
    fn = compiled(model, **{**OPTIONS, "saved.bits": bits, **options})
    fn(torch.randn(128, 64)).float().sum().backward()
    report = fp8compile.report(fn)  # type: ignore[arg-type]
    left = {skip.origin.module: skip.reason for skip in report.notes.skipped(SAVED)}
    return left | {saved.origin.module: saved.codec for saved in report.saved}


# -------------------------------------------------------------------------------------------- golden and contract


def test_golden_forward_of_two_linears() -> None:
    split = split_of(SwiGLU(), torch.randn(128, 64), linears="off", **{"saved.bits": chosen(up="2bit", gate="5bit")})
    text = "".join(f"{line}\n" for line in forward_of(split).splitlines() if "encode" in line)
    assert_expected_inline(
        text,
        """\
view_13: uint8[10240] = encode(addmm)
convert_element_type_17: bfloat16[128, 1] = encode(addmm)
convert_element_type_18: bfloat16[128, 1] = encode(addmm)
view_23: uint8[4096] = encode(addmm_1)
convert_element_type_28: bfloat16[128, 1] = encode(addmm_1)
convert_element_type_29: bfloat16[128, 1] = encode(addmm_1)
""",
    )


def test_each_value_gets_what_is_chosen_and_the_report_says_what_it_costs() -> None:
    found = codecs(SwiGLU(), chosen(up="3bit", gate="6bit"))
    assert found["up"] == f"3bit 1x128 ({ADDS})" and found["gate"] == f"6bit 1x128 ({ADDS})"
    found = codecs(SwiGLU(), chosen(up="8bit", gate="4bit"))
    assert found["up"] == f"int8 1x128 ({ADDS})" and found["gate"] == f"4bit 1x128 ({ADDS})"


def test_a_value_may_stay_exact() -> None:
    found = codecs(SwiGLU(), chosen(up="exact", gate="4bit"))
    kept = "Recipe.saved.bits keeps it exact: 8 bits add 6.2e-02 to the gradients' error"
    assert found["up"] == kept and found["gate"].startswith("4bit")


def test_it_is_idempotent_and_predicted_to_the_byte() -> None:
    bits = chosen(up="2bit", gate="5bit")
    exact = split_of(SwiGLU(), torch.randn(128, 64), disabled="encode_saved", linears="off")
    ctx = Context(Recipe(**OPTIONS, saved={"bits": bits}))
    predicted = sum(plan_saved(exact, ctx).nbytes.values())
    first = encode_saved(exact, ctx)
    assert predicted == sum(each.bytes_after for each in first.saved) == 128 * (128 * 7 // 8 + 8)
    assert not encode_saved(exact, ctx).saved


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_gradients_are_as_good_as_their_bits(codegen: str) -> None:
    """6 dB a bit, as for one number of bits for all; the exact value adds nothing."""
    torch.manual_seed(0)
    model, x = SwiGLU(), torch.randn(128, 64)
    worst = []
    for up in ("4bit", "6bit", "exact"):
        torch._dynamo.reset()
        fn = compiled(model, **OPTIONS, **{"saved.bits": chosen(up=up, gate="exact"), "debug.codegen": codegen})
        worst.append(gradient_sqnr(model, fn, (x,))["gate.weight"])
    assert worst[0] > 16.5 and 10 < worst[1] - worst[0] < 14 and worst[2] > 100


# ------------------------------------------------------------------------------------------- where it declines


@pytest.mark.parametrize(("function", "codec"), [(F.relu, "e4m3"), (torch.exp, "e4m3"), (F.hardswish, "int8")])
def test_what_is_not_smooth_keeps_its_byte_whatever_is_chosen(function: Any, codec: str) -> None:
    split = split_of(Net(function), torch.randn(128, 64), disabled="encode_saved", linears="off")
    (key,) = keys_of(split, Context(Recipe())).values()
    bits = chosen(up="2bit")
    bits = SavedBits((dataclasses.replace(bits.values[0], key=key),))
    (found,) = codecs(Net(function), bits).values()
    assert found.startswith(f"{codec} 1x128 (")


def test_a_smooth_value_has_four_bits_at_least() -> None:
    found = codecs(SwiGLU(), chosen(up="2bit", gate="2bit"))
    assert found["gate"] == "4bit 1x128 (a function, silu, of it in the backward)"


@pytest.mark.parametrize(
    "bits",
    [
        chosen(up="2bit", other="2bit"),  # gate is not in it
        chosen(up="2bit", gate="2bit,2bit"),  # another number of such values
    ],
)
def test_a_value_that_is_not_found_is_stored_by_the_rule_for_all(bits: SavedBits) -> None:
    found = codecs(SwiGLU(), bits)
    assert found["up"].startswith("2bit")
    assert found["gate"] == "int8 1x128 (not among the values of Recipe.saved.bits)"
    found = codecs(SwiGLU(), bits, saved="5bit")
    assert found["gate"] == "5bit 1x128 (not among the values of Recipe.saved.bits)"


def test_a_choice_for_another_model_is_told() -> None:
    with pytest.warns(UserWarning, match=r"none of its 2 values is in this graph.* of q .*calibrate_bits"):
        found = codecs(SwiGLU(), chosen(q="2bit", k="2bit"))
    assert all("not among the values of Recipe.saved.bits" in codec for codec in found.values())


def test_values_that_the_model_no_longer_saves_are_reported() -> None:
    torch._dynamo.reset()
    fn = compiled(SwiGLU(), **OPTIONS, **{"saved.bits": chosen(up="2bit", gate="4bit", other="2bit")})
    fn(torch.randn(128, 64)).sum().backward()
    (told,) = fp8compile.report(fn).notes.skipped(RECIPE)  # type: ignore[arg-type]
    assert told.name == "addmm.default of other (f32)" and told.reason == NOT_SAVED


def test_modules_may_leave_the_choice_out() -> None:
    found = codecs(SwiGLU(), chosen(up="2bit", gate="5bit"), modules={"up": {"saved.bits": "off"}})
    assert found["up"] == "int8 1x128" and found["gate"].startswith("5bit")


def test_what_the_recipe_leaves_is_left() -> None:
    found = codecs(SwiGLU(), chosen(up="2bit", gate="5bit"), skip=("up",))
    assert found["up"] == "Recipe.skip: module 'up' matches 'up'"
    with pytest.raises(ValueError, match=r"saved.bits.*has no effect here"):
        Recipe(saved={"format": "off", "bits": chosen(up="2bit")})


def test_keys_are_counted_before_a_budget_gives_values_up() -> None:
    """What is left under a memory budget keeps its number, and what is saved instead of another has none."""
    split = split_of(Twice(), torch.randn(128, 64), disabled="encode_saved", linears="off")
    ctx = Context(Recipe(**OPTIONS, saved={"bits": chosen(inner="2bit,5bit")}))
    assert len(plan_saved(split, ctx).nbytes) == 2
    first = next(edge for edge in split.edges if edge.info.origin.module == "inner")
    split.edges.remove(first)
    (left,) = encode_saved(split, ctx).saved
    assert left.codec == f"5bit 1x128 ({ADDS})"


def test_values_of_one_module_and_operation_are_told_apart_by_their_order() -> None:
    split = split_of(Twice(), torch.randn(128, 64), linears="off", **{"saved.bits": chosen(inner="2bit,5bit")})
    made = [str(edge.forward.meta["val"].shape[0]) for edge in split.edges if edge.backward.name.endswith("_codes")]
    assert made == [str(128 * 64 * bits // 8) for bits in (2, 5)]
