"""``Recipe.modules``: other recipes for some modules, as given by the user, normalised and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8compile.recipe.frozen import FrozenModules

# One for all modules.
PER_GRAPH = ("codegen", "inductor", "dump", "check", "amax_history_len", "amax_compute", "margin", "card_gib")

BY_MODULE = "{} sets {}, which cannot differ by module. Set it on the recipe itself."


def module_recipes(value: Any, base: Any) -> FrozenModules:
    """``Recipe.modules`` as given by the user, normalised; dicts in it are changes to ``base``.

    Raises:
        ValueError: not a mapping from patterns to recipes, or a recipe that a module cannot have.
    """
    if not isinstance(value, Mapping) or not all(isinstance(p, str) for p in value):
        raise ValueError(f'Recipe.modules must be a dict such as {{"layers.0": "off"}}, not {value!r}.')
    if not value:
        return FrozenModules()
    plain = dataclasses.replace(base, modules={}, codegen="inductor", inductor={}, dump=None, check="off")
    return FrozenModules((pattern, _recipe_of(pattern, given, plain)) for pattern, given in value.items())


def _recipe_of(pattern: str, given: Any, base: Any) -> Any:
    where = f"Recipe.modules[{pattern!r}]"
    if isinstance(given, Mapping):
        for name in PER_GRAPH:
            if name in given and given[name] != getattr(base, name):
                raise ValueError(BY_MODULE.format(where, name))
    try:
        recipe = base.resolve(given, base)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if recipe.modules:
        raise ValueError(f"{where} holds modules of its own. Put all patterns into one dict, the most special first.")
    for name in PER_GRAPH:
        if getattr(recipe, name) != getattr(base, name):
            raise ValueError(BY_MODULE.format(where, name))
    return recipe


def check_modules(recipe: Any) -> None:
    """Raises ValueError for what a module's recipe cannot have beside the recipe of the whole model."""
    for pattern, own in recipe.modules.items():
        if own.memory_budget not in (1.0, recipe.memory_budget):
            raise ValueError(
                f"Recipe.modules[{pattern!r}].memory_budget is {own.memory_budget!r}, and a budget is one for the "
                "whole graph: set Recipe.memory_budget, and in modules 1.0 for what must not be computed again."
            )
        if own.saved_bits not in ("off", recipe.saved_bits):
            raise ValueError(
                f"Recipe.modules[{pattern!r}].saved_bits is another than the recipe's, and a choice is of a whole model: "
                "set Recipe.saved_bits, and in modules 'off' where it is not to hold."
            )
        if not isinstance(own.islands, str) and own.islands != recipe.islands:
            raise ValueError(
                f"Recipe.modules[{pattern!r}].islands is a calibration, which is of a whole model: set Recipe.islands to "
                "it, and what differs in modules to 'auto', 'policy' or 'off'."
            )
