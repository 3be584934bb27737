"""Recipes: presets, values that cannot be, keys."""

from __future__ import annotations

import dataclasses

import pytest

from fp8compile import Recipe
from fp8compile.recipe import PRESETS


def test_every_preset_builds_and_differs_only_where_it_says() -> None:
    assert Recipe.preset("default") == Recipe()
    assert not Recipe.preset("conservative").saved_attention
    assert Recipe.preset("off").saved == "off" and Recipe.preset("off").linear == "off"
    assert Recipe.preset("storage_only").linear == "off" and Recipe.preset("storage_only").saved == "groupwise"
    assert Recipe.preset("linear_only").saved == "off" and Recipe.preset("linear_only").linear == "tensorwise"
    assert set(PRESETS) == {"default", "conservative", "linear_only", "storage_only", "off"}


def test_a_recipe_is_frozen_and_hashable() -> None:
    recipe = Recipe(inductor={"max_autotune": True}, skip=["layers.0.*"])
    assert hash(recipe) == hash(Recipe(inductor={"max_autotune": True}, skip=("layers.0.*",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.saved = "off"  # type: ignore[misc]


def test_the_key_knows_every_field_but_dump() -> None:
    changes = dict(
        linear="rowwise", linear_formats="e4m3", linear_skip=("head",), emulate=True, saved="off",
        saved_format="int8", group_size=64, saved_attention=False, attention_format="e4m3", min_saved_numel=1, skip=("a",), codegen="eager",
        inductor={"debug": True},
    )  # fmt: skip
    assert {f.name for f in dataclasses.fields(Recipe)} == {*changes, "dump"}
    keys = {Recipe(**{name: value}).key for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(keys | {Recipe().key}) == len(changes) + 1
    assert Recipe(dump="somewhere").key == Recipe().key and Recipe(dump="somewhere") == Recipe()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saved_fromat": "int8"}, "no field 'saved_fromat'. Did you mean 'saved_format'?"),
        ({"preset": "conservativ"}, "no preset 'conservativ'. Did you mean 'conservative'?"),
        ({"saved_format": "int4"}, "saved_format cannot be 'int4'. Did you mean 'int8'?"),
        ({"saved": "groupwize"}, "saved cannot be 'groupwize'. Did you mean 'groupwise'?"),
        ({"saved": True}, "saved cannot be True"),
        ({"group_size": 8}, "group_size must be an integer from 16 to 65536, not 8"),
        ({"group_size": 128.0}, "group_size must be an integer"),
        ({"min_saved_numel": -1}, "min_saved_numel must be a number of elements >= 0, not -1"),
        ({"saved_attention": "yes"}, "saved_attention must be True or False, not 'yes'"),
        ({"skip": 3}, "skip must be module path patterns"),
        ({"inductor": "max"}, "inductor must be a dict of Inductor options"),
        ({"dump": 3}, "dump must be the path of a folder"),
    ],
)
def test_a_wrong_option_names_the_value_and_the_cure(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.from_options(options)
    assert message in str(caught.value)


def test_a_single_pattern_is_a_pattern_not_a_list_of_letters() -> None:
    assert Recipe(skip="layers.*").skip == ("layers.*",)  # type: ignore[arg-type]
