"""The recipe that leaves some candidates exact, and the options that give it in one line.

    modules = {path: {"saved": "off"} | {"linears": "off"} | both}, deepest first, before the user's own patterns

A pattern holds for all modules under a module too. A module under it that is to stay encoded gets an earlier entry of its
own, with no changes: ``{"layers.0.mlp": {}, "layers.0": {"saved": "off"}}``. If the same is exact in all numbered siblings,
one entry with ``*`` stands for all.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from fp8compile.recipe.modules import NEUTRAL
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.checking.repair import LINEAR, SAVED, RepairCandidate

Modules = dict[str, dict[str, Any]]
SWITCHES = {SAVED: "saved.format", LINEAR: "linears.mode"}  # what "off" is said of


def leaving(recipe: Recipe, exact: Set[RepairCandidate], known: Iterable[RepairCandidate]) -> Recipe:
    """``recipe`` with the candidates ``exact`` left as they are, and all others ``known`` as before."""
    return with_modules(recipe, entries(exact, known, recipe))


def entries(exact: Set[RepairCandidate], known: Iterable[RepairCandidate], recipe: Recipe) -> Modules:
    """The shortest entries of these forms for ``Recipe.modules`` that change no other candidate."""
    own = _by_module(exact)
    shorter = _with_wildcards(own)
    forms = [shorter, own] if len(shorter) < len(own) and not recipe.modules else [own]
    for form in forms:
        found = with_modules(recipe, form)
        if all((found.at(c.module).get(SWITCHES[c.kind]) == "off") == (c in exact) for c in known):
            return form
    return _guarded(own, known)


def with_modules(recipe: Recipe, new: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """``recipe`` with entries before its own; each is a change to the recipe that holds in such a module now."""
    plain = recipe.replace_in_all(NEUTRAL)
    modules: dict[str, Any] = {
        pattern: plain.at(_unescaped(pattern)).changed({"modules": {}, **changes}) for pattern, changes in new.items()
    }
    modules |= {pattern: other for pattern, other in plain.modules.items() if pattern not in modules}
    return recipe.changed({"modules": modules})


def _unescaped(pattern: str) -> str:
    return re.sub(r"\[([*?[])\]", r"\1", pattern)


def _by_module(exact: Iterable[RepairCandidate]) -> Modules:
    found: Modules = {}
    for candidate in exact:
        found.setdefault(glob.escape(candidate.module), {})[candidate.kind] = "off"
    return {pattern: dict(sorted(found[pattern].items())) for pattern in sorted(found, key=_deepest_first)}


def _guarded(own: Modules, known: Iterable[RepairCandidate]) -> Modules:
    """``own``, with an entry without changes for every other module under one of them."""
    beneath = {glob.escape(c.module) for c in known} - own.keys()
    beneath = {path for path in beneath if any(not p or path.startswith(f"{p}.") for p in own)}
    merged = {**own, **{path: {} for path in beneath}}
    return {pattern: merged[pattern] for pattern in sorted(merged, key=_deepest_first)}


def _with_wildcards(own: Modules) -> Modules:
    """``own`` with ``*`` for numbers: useful where all siblings are alike."""
    found: Modules = {}
    for pattern, changes in own.items():
        found.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", pattern), changes)
    return found


def _deepest_first(pattern: str) -> tuple[int, str]:
    return (-pattern.count(".") - bool(pattern), pattern)


def options_text(recipe: Recipe) -> str:
    """``options={...}`` for torch.compile that gives this recipe."""
    return f"options={_dict_text(_options(recipe))}"


def _options(recipe: Recipe) -> dict[str, Any]:
    given = recipe.differences(Recipe())
    base = recipe.replace_in_all(NEUTRAL)
    modules = {pattern: other.differences(base) for pattern, other in base.modules.items()}
    return {**given, **({"modules": modules} if modules else {})}


def _dict_text(value: Any) -> str:
    """The value as a user would write it: double quotes, lists for tuples."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_dict_text(k)}: {_dict_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_dict_text, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
