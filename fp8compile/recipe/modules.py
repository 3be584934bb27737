"""Recipes by module: patterns on module paths, each with a recipe of its own. The first that matches decides."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fp8compile.recipe.frozen import FrozenMapping

if TYPE_CHECKING:
    from fp8compile.recipe.recipe import Recipe


class FrozenModules(FrozenMapping):
    """Patterns and their recipes, hashable. Their order counts, so it is part of what makes two equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenModules) and tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(dict(self))


def in_module(path: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the module at ``path`` or one that holds it.

    "layers.0" is layers.0 and all beneath it; "layers.0.*" is all beneath it; "*.mlp" is every mlp and all beneath.
    ``*`` matches dots too. "" is what the model does itself, outside of all its modules.
    """
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def module_recipes(value: Any, base: Recipe) -> FrozenModules:
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


def _recipe_of(pattern: str, given: Any, base: Recipe) -> Recipe:
    from fp8compile.recipe.recipe import PER_GRAPH

    where = f"Recipe.modules[{pattern!r}]"
    try:
        recipe = base.made_from(given, base)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if recipe.modules:
        raise ValueError(f"{where} holds modules of its own. Put all patterns into one dict, the most special first.")
    for name in PER_GRAPH:
        if getattr(recipe, name) != getattr(base, name):
            raise ValueError(f"{where} sets {name}, which cannot differ by module. Set it on the recipe itself.")
    return recipe
