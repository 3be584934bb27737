"""Recipes: presets, values that cannot be, keys."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from fp8compile import Recipe
from fp8compile.recipe.context import Context
from fp8compile.recipe.presets import PRESETS
from fp8compile.recipe.saved_bits import SavedBits


def test_every_preset_builds_and_differs_only_where_it_says() -> None:
    assert Recipe.preset("default") == Recipe()
    assert not Recipe.preset("conservative").saved_attention
    assert Recipe.preset("off").saved == "off" and Recipe.preset("off").linear == "off"
    assert Recipe.preset("storage_only").linear == "off" and Recipe.preset("storage_only").saved == "groupwise"
    assert Recipe.preset("linear_only").saved == "off" and Recipe.preset("linear_only").linear == "tensorwise"
    for mode in ("blockwise", "mxfp8"):
        assert Recipe.preset(mode) == Recipe(linear=mode, linear_formats="e4m3")
    assert set(PRESETS) == {"default", "conservative", "linear_only", "storage_only", "blockwise", "mxfp8", "off"}


def test_a_recipe_is_frozen_and_hashable() -> None:
    recipe = Recipe(inductor={"max_autotune": True}, skip=["layers.0.*"])
    assert hash(recipe) == hash(Recipe(inductor={"max_autotune": True}, skip=("layers.0.*",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.saved = "off"  # type: ignore[misc]


def test_the_key_knows_every_field_but_those_that_look_on() -> None:
    changes = dict(
        linear="rowwise", linear_formats="e4m3", linear_skip=("head",), emulate=True, saved="off",
        saved_format="int8", group_size=64, saved_attention=False, attention_format="e4m3", min_saved_numel=1,
        skip=("a",), codegen="eager", inductor={"debug": True}, modules={"a": "off"}, observe=True,
        islands="off", saved_bits=SavedBits(()), keep_fp32=("a",), collectives="groupwise", linear_scaling="delayed",
        amax_history_len=4, amax_compute="most_recent", margin=2, cache_weights=True, merge_dgrads=True, device_rates="h100",
        smooth_swiglu=True, hadamard_wgrad=True, chunk_logits=8, memory_budget=0.5, card_gib=80.0, offload="auto",
    )  # fmt: skip
    assert {f.name for f in dataclasses.fields(Recipe)} == {*changes, "dump", "check"}
    keys = {dataclasses.replace(Recipe(), **{name: value}).key for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(keys | {Recipe().key}) == len(changes) + 1
    assert Recipe(dump="somewhere").key == Recipe().key and Recipe(dump="somewhere") == Recipe()
    assert Recipe(check="first_step").key == Recipe().key and Recipe(check="first_step") == Recipe()
    assert pickle.dumps(Recipe(check="first_step", dump="x").as_compiled) == pickle.dumps(Recipe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saved_fromat": "int8"}, "no field 'saved_fromat'. Did you mean 'saved_format'?"),
        ({"preset": "conservativ"}, "no preset 'conservativ'. Did you mean 'conservative'?"),
        ({"saved_format": "int4"}, "saved_format cannot be 'int4'. Did you mean 'int8'?"),
        ({"saved_format": "4bits"}, "saved_format cannot be '4bits'. Did you mean '4bit'?"),
        ({"saved_format": "7bit"}, "saved_format cannot be '7bit'. Did you mean "),
        ({"attention_format": "3bit", "group_size": 100}, "multiple of 8 for '3bit', such as 96, not 100"),
        ({"saved": "groupwize"}, "saved cannot be 'groupwize'. Did you mean 'groupwise'?"),
        ({"saved": True}, "saved cannot be True"),
        ({"device_rates": "h10"}, "device_rates cannot be 'h10'. Did you mean 'h100'?"),
        ({"group_size": 8}, "group_size must be an integer from 16 to 65536, not 8"),
        ({"group_size": 128.0}, "group_size must be an integer"),
        ({"min_saved_numel": -1}, "min_saved_numel must be a number of elements >= 0, not -1"),
        ({"saved_attention": "yes"}, "saved_attention must be 'auto', True or False, not 'yes'"),
        ({"saved_attention": 1}, "saved_attention must be 'auto', True or False, not 1"),
        ({"memory_budget": 1.5}, "memory_budget must be a fraction of the default's peak, 0.0 ... 1.0, or bytes"),
        ({"memory_budget": "fit"}, "memory_budget='fit' has to know the device's memory: set Recipe.card_gib"),
        (
            {"memory_budget": "fit", "card_gib": 0},
            "card_gib must be the memory of the device in GiB, such as 80, not 0",
        ),
        ({"modules": {"a": {"card_gib": 24.0}}}, "sets card_gib, which cannot differ by module"),
        ({"chunk_logits": 1}, "chunk_logits must be 'off', 'auto' or a number of chunks from 2 to 64, not 1"),
        ({"chunk_logits": True}, "or a number of chunks from 2 to 64, not True"),
        ({"skip": 3}, "skip must be module path patterns"),
        ({"inductor": "max"}, "inductor must be a dict of Inductor options"),
        ({"dump": 3}, "dump must be the path of a folder"),
        ({"modules": "layers.0"}, 'modules must be a dict such as {"layers.0": "off"}'),
        ({"modules": {3: "off"}}, "modules must be a dict"),
        ({"modules": {"a": "of"}}, "Recipe.modules['a']: fp8compile has no preset 'of'. Did you mean 'off'?"),
        ({"modules": {"a": {"saved_fromat": "int8"}}}, "Recipe.modules['a']: Recipe has no field 'saved_fromat'."),
        ({"modules": {"a": 3}}, "Recipe.modules['a']: A recipe is a Recipe, the name of a preset or a dict"),
        ({"modules": {"a": {"modules": {"b": "off"}}}}, "Recipe.modules['a'] holds modules of its own"),
        ({"modules": {"a": {"codegen": "eager"}}}, "Recipe.modules['a'] sets codegen, which cannot differ by module"),
        ({"modules": {"a": {"inductor": {"debug": True}}}}, "sets inductor, which cannot differ by module"),
        ({"modules": {"a": {"dump": "x"}}}, "sets dump, which cannot differ by module"),
        ({"recipe": Recipe(), "saved": "off", "skip": ()}, "stands alone; put saved, skip into it"),
        ({"linear": "blokwise"}, "linear cannot be 'blokwise'. Did you mean 'blockwise'?"),
        ({"linear_formats": "e5m2"}, "linear_formats cannot be 'e5m2'. Did you mean 'e4m3'?"),
        (
            {"linear_formats": {"backward": "e5m2"}},
            "linear_formats has no direction 'backward'. Did you mean 'forward'?",
        ),
        ({"linear_formats": {"dgrad": "e4m4"}}, "linear_formats['dgrad'] cannot be 'e4m4'. Did you mean 'e4m3'?"),
        ({"linear_formats": {"dgrad": ["e4m3"]}}, "linear_formats['dgrad'] cannot be ['e4m3']."),
        ({"linear_formats": {"dgrad": "e5m2"}}, 'says nothing of wgrad. Name both, as in {"dgrad": "e4m3"'),
        (
            {"linear_formats": {"forward": "e5m2", "dgrad": "e5m2", "wgrad": "e5m2"}},
            "Leave 'forward' out, or set it to 'e4m3'",
        ),
        (
            {"linear": "blockwise", "linear_scaling": "delayed"},
            "has one per block of 1x128 or 128x128. Set linear='tensorwise', or",
        ),
        (
            {"linear": "mxfp8", "linear_scaling": "delayed"},
            "one per block of 1x32. Set linear='tensorwise', or linear_scaling",
        ),
        ({"linear": "blockwise", "cache_weights": True}, "Set linear='tensorwise', or cache_weights=False"),
        ({"linear": "mxfp8", "cache_weights": True}, "Recipe.cache_weights keeps one scale per weight"),
        ({"recipe": 3}, "A recipe is a Recipe, the name of a preset or a dict of its fields, not 3"),
    ],
)
def test_a_wrong_option_names_the_value_and_the_cure(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.from_options(options)
    assert message in str(caught.value)


def test_formats_by_direction_are_a_value_and_become_a_name_where_one_says_the_same() -> None:
    given = {"dgrad": "e4m3", "wgrad": "e5m2"}
    recipe = Recipe(linear_formats=given)
    same = Recipe.from_options({"linear_formats": {"wgrad": "e5m2", "forward": "e4m3", "dgrad": "e4m3"}})
    turned = Recipe(linear_formats={"dgrad": "e5m2", "wgrad": "e4m3"})
    assert recipe == same and hash(recipe) == hash(same) and recipe.key == same.key
    assert len({recipe.key, turned.key, Recipe().key, Recipe(linear_formats="e4m3").key}) == 4
    assert Recipe(linear_formats={"forward": "e4m3", "dgrad": "e5m2", "wgrad": "e5m2"}) == Recipe()
    assert Recipe(linear_formats={"dgrad": "e4m3", "wgrad": "e4m3"}) == Recipe(linear_formats="e4m3")
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again.key == recipe.key and eval(str(recipe)) == recipe
    given["dgrad"] = "e5m2"
    assert recipe == again, "the dict that was given is copied"
    assert Recipe(linear_formats=recipe.linear_formats, modules={"a": {"emulate": True}}).modules["a"] == Recipe(
        linear_formats=recipe.linear_formats, emulate=True
    )


def test_a_single_pattern_is_a_pattern_not_a_list_of_letters() -> None:
    assert Recipe(skip="layers.*").skip == ("layers.*",)  # type: ignore[arg-type]


def test_modules_are_normalised_in_order_and_hashable() -> None:
    recipe = Recipe(saved_format="int8", codegen="eager", modules={"a": {"saved_attention": False}, "*": "off"})
    a, rest = recipe.modules.values()
    assert a == Recipe(saved_format="int8", saved_attention=False), "a dict is a change to the recipe around it"
    assert rest == Recipe.preset("off"), "a preset is a whole recipe"
    assert list(recipe.modules) == ["a", "*"]
    turned = Recipe(saved_format="int8", codegen="eager", modules={"*": rest, "a": a})
    assert turned != recipe and turned.key != recipe.key, "order decides, so it is part of the recipe"
    again = pickle.loads(pickle.dumps(dataclasses.replace(recipe)))
    assert again == recipe and hash(again) == hash(recipe) and again.key == recipe.key
    with pytest.raises(TypeError):
        recipe.modules["b"] = Recipe()  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "saved_format"),
    [
        ("layers.0", "int8"),
        ("layers.0.mlp.up", "int8"),
        ("layers.1", "auto"),  # "layers.1.*" is what lies beneath
        ("layers.1.mlp", "best_of_two"),
        ("layers.10", "auto"),
        ("layers.2.attn.q", "int8"),
        ("layers.2.attention", "auto"),
        ("", "auto"),
    ],
)
def test_the_first_pattern_that_matches_a_module_or_one_around_it_decides(path: str, saved_format: str) -> None:
    int8, best = {"saved_format": "int8"}, {"saved_format": "best_of_two"}
    modules = {"layers.0": int8, "layers.1.*": best, "*.attn": int8, "layers.0.*": best}
    recipe = Recipe(modules=modules, codegen="eager", dump="x")
    found = Context(recipe).recipe_at(path)
    assert found.saved_format == saved_format
    assert found.codegen == "eager" and found.dump == "x", "what is one for the graph is the same everywhere"


def test_a_recipe_says_in_a_line_what_differs_by_module() -> None:
    recipe = Recipe(modules={"layers.0": "off", "norm": {"saved_format": "int8"}, "head": {}})
    off = "linear='off', saved='off', observe=False, islands='off'"
    assert str(recipe) == f"Recipe()\n  in layers.0: {off}\n  in norm: saved_format='int8'\n  in head: the same"
    assert str(Recipe(group_size=64, skip="a")) == "Recipe(group_size=64, skip=('a',))"


def test_a_change_everywhere_reaches_the_modules() -> None:
    recipe = Recipe(saved="off", modules={"a": {"saved": "groupwise"}})
    assert (
        recipe.stores_saved
        and not recipe.replace_in_all(saved="off").stores_saved
        and not Recipe.preset("off").stores_saved
    )


def test_options_can_be_one_recipe() -> None:
    recipe = Recipe(saved_format="int8", modules={"a": "off"})
    assert Recipe.from_options({"recipe": recipe}) is recipe
    assert Recipe.from_options({"recipe": "conservative"}) == Recipe.preset("conservative")
