"""A choice of bits as a file, as a part of the recipe, and for other budgets."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from fp8compile import Recipe
from fp8compile.recipe.context import Context, Place
from fp8compile.recipe.saved_bits import Choice, Key, SavedBits, SavedValue

NAMES = ("2bit", "3bit", "4bit", "5bit", "6bit", "8bit", "exact")
BYTES = (36, 52, 68, 84, 100, 130, 256)  # of 128 elements in 16 bit


def value(module: str, sensitivity: float, names: tuple[str, ...] = NAMES, chosen: str = "exact") -> SavedValue:
    """One of 128 elements whose error goes with the square of the step."""
    taken = dict(zip(NAMES, BYTES, strict=True))
    errors = {name: sensitivity * 4.0 ** -(NAMES.index(name) + 2) for name in NAMES[:-1]} | {"exact": 0.0}
    choices = tuple((name, Choice(taken[name], errors[name])) for name in names)
    return SavedValue(Key(module, "mm.default", "bf16"), 128, choices, chosen)


@pytest.fixture
def small() -> SavedBits:
    return SavedBits((value("a", 1.0), value("b", 4.0**4), value("c", 1.0, ("8bit", "exact"))))


def formats(bits: SavedBits) -> list[str]:
    return [each.chosen for each in bits.values]


# ------------------------------------------------------------------------------------------------------- budgets


def test_the_sensitive_value_gets_the_bits(small: SavedBits) -> None:
    assert formats(small.within(bits=4)) == ["2bit", "6bit", "8bit"]
    assert small.within(bits=4).nbytes == 36 + 100 + 130 == small.bytes_at(4)
    assert small.within(bits=4).error < small.uniform(4).error and formats(small.uniform(4)) == [
        "4bit",
        "4bit",
        "8bit",
    ]


def test_all_bytes_keep_all_exact_and_none_keep_the_fewest(small: SavedBits) -> None:
    assert formats(small.within(bits=16)) == ["exact"] * 3 and small.within(bits=16).error == 0
    assert formats(small.within(bits=2)) == ["2bit", "2bit", "8bit"]


def test_a_budget_may_lie_between_two_formats(small: SavedBits) -> None:
    assert small.bytes_at(3.5) == (small.bytes_at(3) + small.bytes_at(4)) // 2
    assert small.bytes_at(7) == (small.bytes_at(6) + small.bytes_at(8)) // 2
    assert small.bytes_at(12) == (small.bytes_at(8) + small.bytes_at(16)) // 2
    for bits in (2, 2.1, 3.9, 7.5, 13):
        assert small.within(bits=bits).nbytes <= small.bytes_at(bits)


def test_a_budget_of_bytes_is_kept_to_the_byte(small: SavedBits) -> None:
    assert small.within(nbytes=36 + 36 + 130).nbytes == 202
    with pytest.raises(
        ValueError, match="nbytes=201 is too little: the fewest bits that the values may have take 202"
    ):
        small.within(nbytes=201)


@pytest.mark.parametrize("bits", [1.9, 16.5, True, "4bit", float("nan")])
def test_bits_out_of_range_are_refused(small: SavedBits, bits: float) -> None:
    with pytest.raises(ValueError, match=f"bits must be a number from 2 to 16, bits per element .* not {bits!r}"):
        small.within(bits=bits)


def test_one_budget_is_given_not_two_or_none(small: SavedBits) -> None:
    for arguments in ({}, {"bits": 4.0, "nbytes": 300}):
        with pytest.raises(ValueError, match=r"give bits, such as bits=4.0, or nbytes, and not both"):
            small.within(**arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- file


def test_a_file_says_the_same(small: SavedBits, tmp_path: Path) -> None:
    path = tmp_path / "bits.json"
    chosen = small.within(bits=4)
    chosen.save(path)
    again = SavedBits.load(path)
    assert again == chosen and hash(again) == hash(chosen) and again.text == chosen.text == path.read_text()
    assert json.loads(path.read_text())["values"][1]["chosen"] == "6bit"
    assert pickle.loads(pickle.dumps(again)) == chosen and pickle.dumps(again) == pickle.dumps(chosen)
    assert repr(chosen) == f"SavedBits({chosen.digest}, 3 values, {chosen.bits_per_element:.2f} bits)"


def test_its_table_has_the_largest_part_of_the_error_first(small: SavedBits) -> None:
    lines = str(small.within(bits=4)).splitlines()
    assert "adds to the gradients' error" in lines[0] and lines[-1].startswith("all 3")
    assert [line.split(" of ")[1].split(" ")[0] for line in lines[1:-1]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"format": 1', '"format": 2'), "it has format 2, and this is format 1"),
        (
            lambda text: text.replace('"chosen": "exact"', '"chosen": "7bit"'),
            "may be stored as 2bit, .* not as '7bit'",
        ),
        (lambda text: text.replace("[36, ", "[-36, "), "'2bit' with -36 bytes .* is no choice for mm.default of a"),
        (lambda text: text.replace('"nth": 0, ', '"number": 0, '), "unexpected keyword argument 'number'"),
        (lambda text: text[:-20], "Unterminated string"),
        (lambda text: "[]", "it has no 'format' and 'values'"),
        (lambda text: "{}", "it has no 'format' and 'values'"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_cure(small: SavedBits, change: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"this text is no choice of saved bits.*{message}.*calibrate_bits"):
        SavedBits.from_text(change(small.text))  # type: ignore[operator]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no choice of saved bits in .*none.json.*calibrate_bits"):
        Recipe(saved={"bits": str(tmp_path / "none.json")})


# -------------------------------------------------------------------------------------------------------- recipe


def test_a_choice_is_part_of_the_recipe_and_of_its_key(small: SavedBits, tmp_path: Path) -> None:
    path = tmp_path / "bits.json"
    small.save(path)
    recipe, loaded = Recipe(saved={"bits": small}), Recipe(saved={"bits": str(path)})
    assert loaded == recipe and loaded.key == recipe.key and Recipe.from_options({"saved.bits": str(path)}) == recipe
    others = [Recipe(), Recipe(saved={"bits": small.within(bits=4)}), Recipe(saved={"bits": small.within(bits=3)})]
    assert len({each.key for each in (recipe, *others)}) == 4
    assert str(recipe) == f"Recipe(saved={{'bits': {small!r}}})"


def test_modules_have_the_same_choice_or_none(small: SavedBits) -> None:
    recipe = Recipe(saved={"bits": small}, modules={"a": {"saved": "4bit"}, "b": {"saved.bits": "off"}})
    assert recipe.at("a").saved.bits == small and recipe.at("b").saved.bits == "off"
    with pytest.raises(ValueError, match=r"modules\['a'\].saved.bits is another than the recipe's"):
        Recipe(saved={"bits": small}, modules={"a": {"saved.bits": small.within(bits=3)}})


@pytest.mark.parametrize("wrong", [4, "4bit", 4.0, True, None])
def test_one_number_for_all_is_another_field(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"Recipe.saved.bits cannot be .*Recipe.saved.format, such as '4bit'"):
        Recipe(saved={"bits": wrong})


def test_few_bits_need_groups_of_a_multiple_of_eight(small: SavedBits) -> None:
    Recipe(saved={"bits": small, "group_size": 100})  # all exact
    with pytest.raises(ValueError, match="group_size must be a multiple of 8 for '2bit', such as 96, not 100"):
        Recipe(saved={"bits": small.within(bits=4), "group_size": 100})


def test_modules_of_which_the_same_is_chosen_are_not_told_apart(small: SavedBits) -> None:
    pairs = enumerate(("3bit", "3bit", "5bit"))
    three = SavedBits(tuple(value(f"layers.{i}.up", 1.0, chosen=name) for i, name in pairs))
    ctx = Context(Recipe(saved={"bits": three}), place=Place(prefix=""))
    said = [ctx.said_of(f"layers.{i}.up") for i in range(3)]
    assert said[0] == said[1] != said[2] and ctx.recipe.names_modules
    inside = dataclasses.replace(ctx, place=Place(prefix="layers.2"))
    assert inside.said_of("up") == said[2]
