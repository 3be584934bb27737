"""``Recipe.modules``: other recipes for some modules, as given by the user, normalised and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8compile.recipe.changes import FIELDS, single
from fp8compile.recipe.frozen import FrozenModules

# One for all modules.
PER_GRAPH = (
    *("debug.codegen", "debug.inductor", "debug.dump", "debug.check", "memory.card_gib"),
    *("linears.amax_history_len", "linears.margin"),
)
NEUTRAL: Mapping[str, Any] = {name: FIELDS[name] for name in PER_GRAPH}
OF_COMPILING: Mapping[str, Any] = {name: value for name, value in NEUTRAL.items() if name.startswith("debug.")}

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
    plain = base.changed({"modules": {}, **OF_COMPILING})
    return FrozenModules((pattern, _recipe_of(pattern, given, plain)) for pattern, given in value.items())


def _recipe_of(pattern: str, given: Any, base: Any) -> Any:
    where = f"Recipe.modules[{pattern!r}]"
    try:
        written = single({k: v for k, v in given.items() if k != "preset"}) if isinstance(given, Mapping) else {}
        differing = [name for name in PER_GRAPH if name in written and written[name] != base.get(name)]
        recipe = base if differing else base.resolve(given, base)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if differing := differing or [name for name in PER_GRAPH if recipe.get(name) != base.get(name)]:
        raise ValueError(BY_MODULE.format(where, differing[0]))
    if recipe.modules:
        raise ValueError(f"{where} holds modules of its own. Put all patterns into one dict, the most special first.")
    return recipe


def check_modules(recipe: Any) -> None:
    """Raises ValueError for what a module's recipe cannot have beside the recipe of the whole model."""
    for pattern, own in recipe.modules.items():
        if own.memory.budget not in (1.0, recipe.memory.budget):
            raise ValueError(
                f"Recipe.modules[{pattern!r}].memory.budget is {own.memory.budget!r}, and a budget is one for the "
                "whole graph: set Recipe.memory.budget, and in modules 1.0 for what must not be computed again."
            )
        if own.saved.bits not in ("off", recipe.saved.bits):
            raise ValueError(
                f"Recipe.modules[{pattern!r}].saved.bits is another than the recipe's, and a choice is of a whole model: "
                "set Recipe.saved.bits, and in modules 'off' where it is not to hold."
            )
        if not isinstance(own.fp32.islands, str) and own.fp32.islands != recipe.fp32.islands:
            raise ValueError(
                f"Recipe.modules[{pattern!r}].fp32.islands is a calibration, which is of a whole model: set "
                "Recipe.fp32.islands to it, and what differs in modules to 'auto', 'policy' or 'off'."
            )
