"""Recipes: presets, values that cannot be, keys."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from fp8compile import Recipe
from fp8compile.recipe.changes import FIELDS, TOP
from fp8compile.recipe.context import Context
from fp8compile.recipe.presets import PRESETS
from fp8compile.recipe.saved_bits import SavedBits


def test_every_preset_builds_and_differs_only_where_it_says() -> None:
    assert Recipe.preset("default") == Recipe()
    assert Recipe.preset("speed") == Recipe(saved={"max_cost": 0.2})
    assert Recipe.preset("memory") == Recipe(memory={"budget": 0.7, "chunk_logits": "auto"})
    assert Recipe.preset("exact") == Recipe(linears="off", saved="exact")
    assert Recipe.preset("off").saved.format == "off" and Recipe.preset("off").linears.mode == "off"
    assert set(PRESETS) == {"default", "speed", "memory", "exact", "off"}


def test_a_recipe_is_frozen_and_hashable() -> None:
    recipe = Recipe(debug={"inductor": {"max_autotune": True}}, skip=["layers.0.*"])
    assert hash(recipe) == hash(Recipe(debug={"inductor": {"max_autotune": True}}, skip=("layers.0.*",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.saved.format = "off"  # type: ignore[misc]


def test_the_key_knows_every_field_but_those_that_look_on() -> None:
    changes = {
        "linears.mode": "rowwise", "linears.formats": "e4m3", "linears.scaling": "delayed", "linears.amax_history_len": 4,
        "linears.margin": 2, "linears.cache_weights": True,
        "linears.merge_dgrads": True, "linears.smooth_swiglu": True,
        "linears.skip": ("head",), "linears.emulate": True,
        "saved.format": "int8", "saved.bits": SavedBits(()), "saved.group_size": 64, "saved.max_cost": 0.5,
        "saved.attention": False, "saved.attention_format": "e4m3", "saved.min_numel": 1,
        "memory.budget": 0.5, "memory.card_gib": 80.0, "memory.offload": "auto", "memory.chunk_logits": 8,
        "fp32.islands": "off", "fp32.keep": ("a",), "fp32.observe": True,
        "debug.codegen": "eager", "debug.inductor": {"debug": True}, "debug.device_rates": "h100",
        "modules": {"a": "off"}, "skip": ("a",), "collectives": "groupwise",
    }  # fmt: skip
    assert {*FIELDS, *TOP} == {*changes, "debug.dump", "debug.check"} and len(dataclasses.fields(Recipe)) == 8
    keys = {Recipe().changed({name: value}).key for name, value in changes.items()}
    assert len(keys | {Recipe().key}) == len(changes) + 1
    assert Recipe(debug={"dump": "somewhere"}).key == Recipe().key and Recipe(debug={"dump": "somewhere"}) == Recipe()
    assert (
        Recipe(debug={"check": "first_step"}).key == Recipe().key
        and Recipe(debug={"check": "first_step"}) == Recipe()
    )
    assert pickle.dumps(Recipe(debug={"check": "first_step", "dump": "x"}).as_compiled) == pickle.dumps(Recipe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saved_fromat": "int8"}, "no field 'saved_fromat'. Did you mean 'saved.format'?"),
        ({"preset": "memry"}, "no preset 'memry'. Did you mean 'memory'?"),
        ({"saved": "int4"}, "Recipe.saved.format cannot be 'int4'. Did you mean 'int8'?"),
        ({"saved": "4bits"}, "Recipe.saved.format cannot be '4bits'. Did you mean '4bit'?"),
        ({"saved": "7bit"}, "Recipe.saved.format cannot be '7bit'. Did you mean "),
        (
            {"saved.attention_format": "3bit", "saved.group_size": 100},
            "multiple of 8 for '3bit', such as 96, not 100",
        ),
        ({"collectives": "groupwize"}, "collectives cannot be 'groupwize'. Did you mean 'groupwise'?"),
        ({"saved": True}, "saved.format cannot be True"),
        ({"debug.device_rates": "h10"}, "device_rates cannot be 'h10'. Did you mean 'h100'?"),
        ({"saved.group_size": 8}, "group_size must be an integer from 16 to 65536, not 8"),
        ({"saved.group_size": 128.0}, "group_size must be an integer"),
        ({"saved.min_numel": -1}, "saved.min_numel must be a number of elements >= 0, not -1"),
        ({"saved.attention": "auto"}, "saved.attention must be True or False, not 'auto'"),
        ({"fp32.observe": 1}, "fp32.observe must be 'auto', True or False, not 1"),
        (
            {"saved.max_cost": "all"},
            "saved.max_cost must be 'auto', 'any', or a share of a value's worth >= 0.0, not 'all'",
        ),
        (
            {"saved.max_cost": -0.1},
            "saved.max_cost must be 'auto', 'any', or a share of a value's worth >= 0.0, not -0.1",
        ),
        (
            {"saved.max_cost": True},
            "saved.max_cost must be 'auto', 'any', or a share of a value's worth >= 0.0, not True",
        ),
        ({"memory": 1.5}, "memory.budget must be a fraction of the default's peak, 0.0 ... 1.0, or bytes"),
        ({"memory": "fit"}, "memory.budget='fit' has to know the device's memory: set Recipe.memory.card_gib"),
        (
            {"memory": "fit", "memory.card_gib": 0},
            "card_gib must be the memory of the device in GiB, such as 80, not 0",
        ),
        ({"modules": {"a": {"memory.card_gib": 24.0}}}, "sets memory.card_gib, which cannot differ by module"),
        ({"memory.chunk_logits": 1}, "chunk_logits must be 'off', 'auto' or a number of chunks from 2 to 64, not 1"),
        ({"memory.chunk_logits": True}, "or a number of chunks from 2 to 64, not True"),
        ({"skip": 3}, "skip must be module path patterns"),
        ({"debug.inductor": "max"}, "inductor must be a dict of Inductor options"),
        ({"debug.dump": 3}, "dump must be the path of a folder"),
        ({"modules": "layers.0"}, 'modules must be a dict such as {"layers.0": "off"}'),
        ({"modules": {3: "off"}}, "modules must be a dict"),
        ({"modules": {"a": "of"}}, "Recipe.modules['a']: fp8compile has no preset 'of'. Did you mean 'off'?"),
        ({"modules": {"a": {"saved_fromat": "int8"}}}, "Recipe.modules['a']: Recipe has no field 'saved_fromat'."),
        ({"modules": {"a": 3}}, "Recipe.modules['a']: A recipe is a Recipe, the name of a preset or a dict"),
        ({"modules": {"a": {"modules": {"b": "off"}}}}, "Recipe.modules['a'] holds modules of its own"),
        (
            {"modules": {"a": {"debug.codegen": "eager"}}},
            "Recipe.modules['a'] sets debug.codegen, which cannot differ by module",
        ),
        (
            {"modules": {"a": {"debug.inductor": {"debug": True}}}},
            "sets debug.inductor, which cannot differ by module",
        ),
        ({"modules": {"a": {"debug.dump": "x"}}}, "sets debug.dump, which cannot differ by module"),
        ({"recipe": Recipe(), "saved": "off", "skip": ()}, "stands alone; put saved, skip into it"),
        ({"linears": "blokwise"}, "linears.mode cannot be 'blokwise'. Did you mean 'blockwise'?"),
        ({"linears.formats": "e5m2"}, "linears.formats cannot be 'e5m2'. Did you mean 'e4m3'?"),
        (
            {"linears.formats": {"backward": "e5m2"}},
            "linears.formats has no direction 'backward'. Did you mean 'forward'?",
        ),
        ({"linears.formats": {"dgrad": "e4m4"}}, "linears.formats['dgrad'] cannot be 'e4m4'. Did you mean 'e4m3'?"),
        ({"linears.formats": {"dgrad": ["e4m3"]}}, "linears.formats['dgrad'] cannot be ['e4m3']."),
        ({"linears.formats": {"dgrad": "e5m2"}}, 'says nothing of wgrad. Name both, as in {"dgrad": "e4m3"'),
        (
            {"linears.formats": {"forward": "e5m2", "dgrad": "e5m2", "wgrad": "e5m2"}},
            "Leave 'forward' out, or set it to 'e4m3'",
        ),
        (
            {"linears": "blockwise", "linears.scaling": "delayed"},
            "has one per block of 1x128 or 128x128. Set linears.mode='tensorwise', or",
        ),
        (
            {"linears": "mxfp8", "linears.scaling": "delayed"},
            "one per block of 1x32. Set linears.mode='tensorwise', or linears.scaling",
        ),
        (
            {"linears": "blockwise", "linears.cache_weights": True},
            "Set linears.mode='tensorwise', or linears.cache_weights=False",
        ),
        (
            {"linears": "mxfp8", "linears.cache_weights": True},
            "Recipe.linears.cache_weights keeps one scale per weight",
        ),
        (
            {"saved": "4bit", "saved.format": "int8"},
            "saved.format is '4bit' and, by 'saved.format', 'int8'. Leave one",
        ),
        ({"saved": {"format": "4bit"}, "saved.format": "int8"}, "Leave one of them out"),
        ({"debug": "eager"}, "Recipe.debug must be a dict of its fields, not 'eager'"),
        ({"saved": {"min_numle": 0}}, "no field 'saved.min_numle'. Did you mean 'saved.min_numel'?"),
        ({"min_numel": 0}, "no field 'min_numel'. Did you mean 'saved.min_numel'?"),
        ({"recipe": 3}, "A recipe is a Recipe, the name of a preset or a dict of its fields, not 3"),
    ],
)
def test_a_wrong_option_names_the_value_and_the_cure(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.from_options(options)
    assert message in str(caught.value)


def test_formats_by_direction_are_a_value_and_become_a_name_where_one_says_the_same() -> None:
    given = {"dgrad": "e4m3", "wgrad": "e5m2"}
    recipe = Recipe(linears={"formats": given})
    same = Recipe.from_options({"linears.formats": {"wgrad": "e5m2", "forward": "e4m3", "dgrad": "e4m3"}})
    turned = Recipe(linears={"formats": {"dgrad": "e5m2", "wgrad": "e4m3"}})
    assert recipe == same and hash(recipe) == hash(same) and recipe.key == same.key
    assert len({recipe.key, turned.key, Recipe().key, Recipe(linears={"formats": "e4m3"}).key}) == 4
    assert Recipe(linears={"formats": {"forward": "e4m3", "dgrad": "e5m2", "wgrad": "e5m2"}}) == Recipe()
    assert Recipe(linears={"formats": {"dgrad": "e4m3", "wgrad": "e4m3"}}) == Recipe(linears={"formats": "e4m3"})
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again.key == recipe.key and eval(str(recipe)) == recipe
    given["dgrad"] = "e5m2"
    assert recipe == again, "the dict that was given is copied"
    assert Recipe(linears={"formats": recipe.linears.formats}, modules={"a": {"linears.emulate": True}}).modules[
        "a"
    ] == Recipe(linears={"formats": recipe.linears.formats, "emulate": True})


def test_a_single_pattern_is_a_pattern_not_a_list_of_letters() -> None:
    assert Recipe(skip="layers.*").skip == ("layers.*",)  # type: ignore[arg-type]


def test_modules_are_normalised_in_order_and_hashable() -> None:
    recipe = Recipe(saved="int8", debug={"codegen": "eager"}, modules={"a": {"saved.attention": False}, "*": "off"})
    a, rest = recipe.modules.values()
    assert a == Recipe(saved={"format": "int8", "attention": False}), "a dict is a change to the recipe around it"
    assert rest == Recipe.preset("off"), "a preset is a whole recipe"
    assert list(recipe.modules) == ["a", "*"]
    turned = Recipe(saved="int8", debug={"codegen": "eager"}, modules={"*": rest, "a": a})
    assert turned != recipe and turned.key != recipe.key, "order decides, so it is part of the recipe"
    again = pickle.loads(pickle.dumps(dataclasses.replace(recipe)))
    assert again == recipe and hash(again) == hash(recipe) and again.key == recipe.key
    with pytest.raises(TypeError):
        recipe.modules["b"] = Recipe()  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "saved"),
    [
        ("layers.0", "int8"),
        ("layers.0.mlp.up", "int8"),
        ("layers.1", "auto"),  # "layers.1.*" is what lies beneath
        ("layers.1.mlp", "e4m3"),
        ("layers.10", "auto"),
        ("layers.2.attn.q", "int8"),
        ("layers.2.attention", "auto"),
        ("", "auto"),
    ],
)
def test_the_first_pattern_that_matches_a_module_or_one_around_it_decides(path: str, saved: str) -> None:
    int8, e4m3 = {"saved": "int8"}, {"saved": "e4m3"}
    modules = {"layers.0": int8, "layers.1.*": e4m3, "*.attn": int8, "layers.0.*": e4m3}
    recipe = Recipe(modules=modules, debug={"codegen": "eager", "dump": "x"})
    found = Context(recipe).recipe_at(path)
    assert found.saved.format == saved
    assert found.debug.codegen == "eager" and found.debug.dump == "x", (
        "what is one for the graph is the same everywhere"
    )


def test_a_recipe_says_in_a_line_what_differs_by_module() -> None:
    recipe = Recipe(modules={"layers.0": "off", "norm": {"saved": "int8"}, "head": {}})
    off = "linears='off', saved='off', fp32={'islands': 'off', 'observe': False}"
    assert str(recipe) == f"Recipe()\n  in layers.0: {off}\n  in norm: saved='int8'\n  in head: the same"
    assert str(Recipe(saved={"group_size": 64}, skip="a")) == "Recipe(saved={'group_size': 64}, skip=('a',))"


def test_a_change_everywhere_reaches_the_modules() -> None:
    recipe = Recipe(saved="off", modules={"a": {"saved": "auto"}})
    assert (
        recipe.stores_saved
        and not recipe.replace_in_all({"saved": "off"}).stores_saved
        and not Recipe.preset("off").stores_saved
    )


def test_options_can_be_one_recipe() -> None:
    recipe = Recipe(saved="int8", modules={"a": "off"})
    assert Recipe.from_options({"recipe": recipe}) is recipe
    assert Recipe.from_options({"recipe": "speed"}) == Recipe.preset("speed")


def test_a_group_is_written_as_one_value_as_a_dict_or_field_by_field() -> None:
    delayed = Recipe(linears="delayed")
    assert delayed.linears.scaling == "delayed" and delayed.linears.mode == "auto"
    assert delayed == Recipe(linears={"scaling": "delayed"}) == Recipe.from_options({"linears.scaling": "delayed"})
    assert Recipe(memory=0.5) == Recipe(**{"memory.budget": 0.5}) and Recipe(fp32="policy").fp32.islands == "policy"
    few = Recipe(saved={"format": "4bit", "group_size": 64}, **{"saved.min_numel": 0})
    assert (few.saved.format, few.saved.group_size, few.saved.min_numel) == ("4bit", 64, 0)
    assert few.changed({"saved": "off"}).saved.group_size == 64, "a change leaves what it does not name"
    assert Recipe.preset("exact", linears={"mode": "rowwise"}).saved.format == "exact"
    assert Recipe.from_options({"saved": few.saved}) == Recipe(saved=few.saved) == few


def test_a_group_in_the_place_of_another_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Recipe\.linears\.mode cannot be Saved"):
        Recipe(linears=Recipe().saved)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Recipe\.debug must be a dict of its fields, not Saved"):
        Recipe(debug=Recipe().saved)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe.preset("off"),
        Recipe(linears={"mode": "rowwise", "formats": {"dgrad": "e4m3", "wgrad": "e5m2"}}, saved="4bit", memory=0.5),
        Recipe(linears="delayed", saved={"group_size": 64, "bits": "off"}, skip="a", collectives="groupwise"),
        Recipe(fp32={"keep": ("a", "aten.exp")}, debug={"inductor": {"max_autotune": True}}),
    ],
    ids=str,
)
def test_its_text_and_its_differences_give_it_again(recipe: Recipe) -> None:
    assert eval(str(recipe)) == recipe == Recipe().changed(recipe.differences(Recipe()))
