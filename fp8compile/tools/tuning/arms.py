"""Which recipes are compared: plain Inductor, always and first; then what the user names, or what suits the device.

Arms stand from the simplest on: where two are alike in what is measured, the one that stands first is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile.linears.device import fp8_unsupported_reason, int8_unsupported_reason
from fp8compile.recipe.changes import FIELDS, TOP
from fp8compile.recipe.groups import GROUPS
from fp8compile.recipe.recipe import Recipe

PLAIN = "plain Inductor"
OFF = Recipe.preset("off")  # what stands for plain Inductor where a recipe is asked for

WITH_FP8: Mapping[str, Any] = {
    "storage": {"linears": "off"},
    "linears": {"linears": "tensorwise", "saved": "off"},
    "speed": "speed",
    "default": "default",
    "all_codes": {"saved.max_cost": "any"},
    "delayed": {"linears.scaling": "delayed"},
    "few_bits": {"saved": "4bit"},
}
WITHOUT_FP8: Mapping[str, Any] = {  # there "default" is "storage", and "linears" is plain Inductor
    "storage": {"linears": "off"},
    "half_budget": {"linears": "off", "memory": 0.5},
    "int8": {"linears": "int8"},
    "few_bits": {"linears": "off", "saved": "4bit"},
}

NO_LIST = (
    "tune: recipes={0!r}: a list of recipes is needed, or a mapping from names to them; of one recipe a list of one. "
    "Without recipes= those that suit the device are measured"
)


@dataclass(frozen=True)
class TunedArm:
    """A recipe under a name; ``PLAIN`` is compiled by Inductor itself."""

    name: str
    recipe: Recipe

    @property
    def is_plain(self) -> bool:
        return self.name == PLAIN


def arms_for(recipes: Iterable[Any] | Mapping[str, Any] | None, device: torch.device) -> tuple[TunedArm, ...]:
    """Plain Inductor and the others, each recipe once.

    Args:
        recipes: what ``Recipe.resolve`` takes, several of them, or under names; None: those that suit ``device``.
        device: where the model is.

    Raises:
        ValueError: ``recipes`` is no list or is empty, or one of them is no recipe.
    """
    found = [TunedArm(PLAIN, OFF)]
    for name, value in (_suiting(device) if recipes is None else _named(recipes)).items():
        recipe = _resolved(name, value)
        if all(recipe != other.recipe for other in found):
            found.append(TunedArm(name, recipe))
    return tuple(found)


def _suiting(device: torch.device) -> Mapping[str, Any]:
    if fp8_unsupported_reason(device) is None:
        return WITH_FP8
    has_int8 = int8_unsupported_reason(device) is None
    return {name: recipe for name, recipe in WITHOUT_FP8.items() if name != "int8" or has_int8}


def _named(recipes: Iterable[Any] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(recipes, (str, Recipe)) or not isinstance(recipes, (Mapping, Sequence)) or not recipes:
        raise ValueError(NO_LIST.format(recipes))
    if not isinstance(recipes, Mapping):
        return {_name_of(recipe): recipe for recipe in recipes}
    if known := [field for field in recipes if field == "preset" or field in (*FIELDS, *GROUPS, *TOP)]:
        raise ValueError(f"{NO_LIST.format(recipes)}. {known[0]!r} is a field of one recipe: recipes=[{recipes!r}]")
    return recipes


def _name_of(recipe: Any) -> str:
    if isinstance(recipe, Mapping):
        return ", ".join(f"{field}={value}" for field, value in recipe.items())
    return str(recipe).removeprefix("Recipe(").removesuffix(")")


def _resolved(name: str, value: Any) -> Recipe:
    try:
        return Recipe.resolve(value, Recipe())
    except ValueError as error:
        raise ValueError(f"tune: recipes: {name!r}: {error}") from None
