"""Forty contradictory or misspelt inputs: each is refused where it is written, in one line with the value and the fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import Recipe, optim
from fp8compile.amp import LossScaler
from fp8compile.recipe.saved_bits import SavedBits

DELAYED = {"linear_scaling": "delayed", "cache_weights": True}
# Fields that contradict each other, and the one that is named.
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"linear": "off", "linear_formats": "e4m3"}, "linear_formats"),
    ({"linear": "int8", "linear_formats": "e4m3"}, "linear_formats"),
    ({"linear": "off", "emulate": True}, "emulate"),
    ({"margin": 4}, "margin"),
    ({"linear": "off", "linear_scaling": "delayed", "margin": 4}, "margin"),
    ({"amax_history_len": 64}, "amax_history_len"),
    ({"amax_compute": "most_recent"}, "amax_compute"),
    ({"saved": "off", "saved_format": "int8"}, "saved_format"),
    ({"saved": "off", "saved_attention": "auto"}, "saved_attention"),
    ({"saved": "off", "attention_format": "4bit"}, "attention_format"),
    ({"saved_attention": False, "attention_format": "4bit"}, "attention_format"),
    ({"merge_dgrads": True}, "merge_dgrads"),
    ({"merge_dgrads": True, "linear_scaling": "delayed"}, "merge_dgrads"),
    ({"merge_dgrads": True, "linear": "off", **DELAYED}, "merge_dgrads"),
    ({"linear": "rowwise", "smooth_swiglu": True}, "smooth_swiglu"),
    ({"linear_scaling": "delayed", "smooth_swiglu": True}, "smooth_swiglu"),
    ({"cache_weights": True, "smooth_swiglu": True}, "smooth_swiglu"),
    ({"hadamard_wgrad": True}, "hadamard_wgrad"),
    ({"card_gib": 80.0}, "card_gib"),
    ({"modules": {"a": {"margin": 4}}}, "margin"),
]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape or (64, 64)))


def model() -> nn.Module:
    return torch.compile(nn.Linear(4, 4), backend="fp8compile")  # type: ignore[return-value]


# Calls, with the value and a word of the fix that their message must have.
REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: Recipe.preset(3), "3", "Known: "),  # type: ignore[arg-type]
    (lambda: Recipe.preset("conservativ"), "'conservativ'", "'conservative'"),
    (lambda: Recipe.from_options({"saved_fromat": "int8"}), "'saved_fromat'", "'saved_format'"),
    (lambda: Recipe(saved_format="4bits"), "'4bits'", "'4bit'"),
    (lambda: Recipe(saved_bits={}), "{}", "calibrate_bits"),
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


def test_there_are_forty() -> None:
    assert len(WITHOUT_EFFECT) + len(REFUSED) == 40


@pytest.mark.parametrize(
    "fields",
    [
        {"linear": "off", "emulate": True, "modules": {"a": {"linear": "tensorwise"}}},
        {"emulate": True, "modules": {"a": {"linear": "off"}, "b": "off"}},
        {"saved_format": "int8", "modules": {"a": {"saved": "off"}}},
        {"linear_scaling": "delayed", "margin": 4, "modules": {"a": {"linear": "off"}}},
        {"linear": "off", "linear_scaling": "dynamic", "margin": 1, "emulate": False},
        {"linear": "off", "saved": "off", "saved_attention": True},
        {"preset": "mxfp8", "emulate": True},
        {"preset": "conservative", "saved": "off"},
        {"memory_budget": "fit", "card_gib": 80.0},
        {"merge_dgrads": True, **DELAYED},
    ],
    ids=str,
)
def test_what_has_an_effect_in_some_module_or_is_a_default_is_taken(fields: dict[str, Any]) -> None:
    recipe = Recipe.from_options(fields)
    assert dataclasses.replace(recipe, observe=False).linear == recipe.linear


def test_a_change_of_another_field_leaves_what_was_written_before() -> None:
    recipe = Recipe(linear_scaling="delayed", margin=4, emulate=True)
    assert Recipe.resolve({"linear": "off"}, recipe).margin == 4
    assert dataclasses.replace(recipe, linear="off").emulate
