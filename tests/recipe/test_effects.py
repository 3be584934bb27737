"""Forty contradictory or misspelt inputs: each is refused where it is written, in one line with the value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import Recipe, optim
from fp8compile.amp import LossScaler
from fp8compile.recipe.saved_bits import SavedBits

DELAYED = {"linears.scaling": "delayed", "linears.cache_weights": True}
# Fields that contradict each other, and the one that is named.
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"linears": "off", "linears.formats": "e4m3"}, "linears.formats"),
    ({"linears": "int8", "linears.formats": "e4m3"}, "linears.formats"),
    ({"linears": "off", "linears.emulate": True}, "emulate"),
    ({"linears.margin": 4}, "margin"),
    ({"linears": "off", "linears.scaling": "delayed", "linears.margin": 4}, "margin"),
    ({"linears.amax_history_len": 64}, "amax_history_len"),
    ({"linears": "off", "linears.margin": 4}, "margin"),
    ({"saved": "off", "saved.attention": False}, "saved.attention"),
    ({"saved": "off", "saved.max_cost": 0.5, "linears": "off"}, "saved.max_cost"),
    ({"saved": "exact", "saved.bits": SavedBits(())}, "saved.bits"),
    ({"saved": "off", "saved.attention_format": "4bit"}, "saved.attention_format"),
    ({"saved.attention": False, "saved.attention_format": "4bit"}, "saved.attention_format"),
    ({"linears.merge_dgrads": True}, "merge_dgrads"),
    ({"linears.merge_dgrads": True, "linears.scaling": "delayed"}, "merge_dgrads"),
    ({"linears.merge_dgrads": True, "linears": "off", **DELAYED}, "merge_dgrads"),
    ({"linears": "rowwise", "linears.smooth_swiglu": True}, "smooth_swiglu"),
    ({"linears.scaling": "delayed", "linears.smooth_swiglu": True}, "smooth_swiglu"),
    ({"linears.cache_weights": True, "linears.smooth_swiglu": True}, "smooth_swiglu"),
    ({"saved": "exact", "saved.attention": False}, "attention"),
    ({"memory.card_gib": 80.0}, "card_gib"),
    ({"modules": {"a": {"linears.margin": 4}}}, "margin"),
]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape or (64, 64)))


def model() -> nn.Module:
    return torch.compile(nn.Linear(4, 4), backend="fp8compile")  # type: ignore[return-value]


# Calls, with the value and a word of the fix that their message must have.
REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: Recipe.preset(3), "3", "Known: "),  # type: ignore[arg-type]
    (lambda: Recipe.preset("exakt"), "'exakt'", "'exact'"),
    (lambda: Recipe.from_options({"saved_fromat": "int8"}), "'saved_fromat'", "'saved.format'"),
    (lambda: Recipe(saved="4bits"), "'4bits'", "'4bit'"),
    (lambda: Recipe(saved={"bits": {}}), "{}", "calibrate_bits"),
    (lambda: SavedBits.from_text("{}"), "'format'", "calibrate_bits"),
    (lambda: fp8compile.set_recipe(model(), "off", modules=0), "modules=0", "leave modules out"),  # type: ignore[arg-type]
    (lambda: fp8compile.set_recipe(model(), "off", modules=[]), "modules=[]", "leave modules out"),
    (lambda: fp8compile.explain(nn.Linear(4, 4)), "args=()", "args=(x,)"),
    (lambda: optim.Muon([weight()], lr=0.1, state_format="dynamic4"), "'dynamic4'", "linear4"),
    (lambda: optim.AdamW([weight()], fused=True), "fused=True", "leave it out"),
    (lambda: optim.AdamW([weight()], foreach=True), "foreach=True", "leave it out"),
    (lambda: optim.AdamW([{"params": [weight()], "fused": True}]), "fused=True", "leave it out"),
    (lambda: optim.AdamW([{"params": [weight()], "state_fromat": "fp32"}]), "'state_fromat'", "'state_format'"),
    (lambda: optim.SGD([{"params": [weight()], "momentun": 0.5}], lr=0.1), "'momentun'", "'momentum'"),
    (lambda: LossScaler("histogram", growth_factor=3.0), "growth_factor=3.0", "mode='dynamic'"),
    (lambda: LossScaler("histogram", backoff_factor=0.3), "backoff_factor=0.3", "mode='dynamic'"),
    (lambda: LossScaler("static", growth_interval=5), "growth_interval=5", "mode='histogram' or 'dynamic'"),
    (lambda: LossScaler("dynamic", period=4), "period=4", "mode='histogram'"),
    (lambda: LossScaler("static", threshold=0.1), "threshold=0.1", "mode='histogram'"),
]


@pytest.mark.parametrize(("fields", "named"), WITHOUT_EFFECT, ids=str)
def test_a_field_without_effect_is_refused_where_it_is_written(fields: dict[str, Any], named: str) -> None:
    for write in (
        lambda: Recipe(**fields),
        lambda: Recipe.from_options(fields),
        lambda: Recipe.resolve(fields, Recipe()),
    ):
        with pytest.raises(ValueError, match=f"{named}") as refused:
            write()
        text = str(refused.value)
        assert len(text.splitlines()) == 1 and ("set " in text or "Set " in text)


@pytest.mark.parametrize(("call", "value", "fix"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(call: Callable[[], Any], value: str, fix: str) -> None:
    with pytest.raises(ValueError) as refused:
        call()
    text = str(refused.value)
    assert value in text and fix in text and len(text.splitlines()) == 1


def test_there_are_forty_one() -> None:
    assert len(WITHOUT_EFFECT) + len(REFUSED) == 41


@pytest.mark.parametrize(
    "fields",
    [
        {"linears": "off", "linears.emulate": True, "modules": {"a": {"linears": "tensorwise"}}},
        {"linears.emulate": True, "modules": {"a": {"linears": "off"}, "b": "off"}},
        {"saved": "int8", "modules": {"a": {"saved": "off"}}},
        {"linears.scaling": "delayed", "linears.margin": 4, "modules": {"a": {"linears": "off"}}},
        {"linears": "off", "linears.scaling": "dynamic", "linears.margin": 1, "linears.emulate": False},
        {"linears": "off", "saved": "off", "saved.attention": True},
        {"preset": "exact", "linears": "mxfp8", "linears.emulate": True},
        {"preset": "memory", "saved": "off"},
        {"memory": "fit", "memory.card_gib": 80.0},
        {"linears.merge_dgrads": True, **DELAYED},
    ],
    ids=str,
)
def test_what_has_an_effect_in_some_module_or_is_a_default_is_taken(fields: dict[str, Any]) -> None:
    recipe = Recipe.from_options(fields)
    assert recipe.changed({"fp32.observe": False}).linears.mode == recipe.linears.mode


def test_a_change_of_another_field_leaves_what_was_written_before() -> None:
    recipe = Recipe(linears={"scaling": "delayed", "margin": 4, "emulate": True})
    assert Recipe.resolve({"linears": "off"}, recipe).linears.margin == 4
    assert recipe.changed({"linears": "off"}).linears.emulate
