"""Switch a compiled model, or modules of it, to another recipe while it trains.

Dynamo guards compiled code with the backend that made it. A new recipe is a new backend, so each graph is compiled once
more at its next call, and what was compiled before stays for the way back. The model itself is not touched.

Dynamo compiles a piece of code at most ``recompile_limit`` times, and then runs it uncompiled. It does not ask which model or
recipe a compilation was for. So each model gets, for each recipe, its own region of Dynamo's code caches (torch.compile's
``isolate_recompiles``). The limit counts within a region, as if the recipe were the only one. No Dynamo setting is written:
it would hold for this thread alone. (Where a torch has no regions, set_recipe refuses the recipe that could be the first
beyond the limit, rather than end in plain eager.)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8compile import _torch as private
from fp8compile._messages import nearest
from fp8compile.fx.provenance import module_names
from fp8compile.recipe.changes import single
from fp8compile.recipe.modules import OF_COMPILING
from fp8compile.recipe.patterns import in_module
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.compiled_module import CompiledWith, running

# For each model, the region of Dynamo's code caches that each recipe it ran has.
_regions: weakref.WeakKeyDictionary[nn.Module, dict[Recipe, int]] = weakref.WeakKeyDictionary()


def set_recipe(
    compiled: nn.Module, recipe: Recipe | str | Mapping[str, Any], modules: str | Sequence[str] | None = None
) -> Recipe:
    """Run ``compiled`` with another recipe from its next call on.

    Every graph is compiled once more at its next call and never again for this recipe; one that ran with it before is
    not compiled again at all. Parameters, their names (after ``torch.compile`` they begin with ``_orig_mod.``, before
    and after), the state dict, optimizers, hooks and the object itself stay as they are, and so do ``mode``,
    ``dynamic`` and ``fullgraph``. A forward that has run goes through the backward it was compiled with.

    Args:
        compiled: what ``torch.compile(model, backend="fp8compile")`` returned, or a model compiled in place.
        recipe: a Recipe, the name of a preset, or a dict of changes to the recipe that runs. With a name or a dict,
            ``codegen``, ``inductor`` and ``dump`` stay as they are.
        modules: patterns on module paths, as in ``Recipe.modules``, for which ``recipe`` holds from now on, whatever
            was set for them before; None is the whole model and forgets what was set for single modules.

    Returns:
        The recipe that runs now.

    Raises:
        ValueError: not compiled, or not by fp8compile; a pattern without a module; a recipe that does not exist.
    """
    now = running(compiled) if isinstance(compiled, nn.Module) else None
    if now is None:
        raise ValueError(_not_ours(compiled))
    root = compiled._orig_mod if isinstance(compiled, private.OptimizedModule) else compiled
    if modules is None:
        new = _for_all(now.recipe, recipe)
    else:
        patterns = _patterns(modules)
        _check(patterns, root)
        new = _for_some(now.recipe, recipe, patterns)
    if new != now.recipe:
        _install(compiled, root, now, new)
    return new


def _patterns(modules: Any) -> tuple[str, ...]:
    patterns = (modules,) if isinstance(modules, str) else modules
    if not isinstance(patterns, (tuple, list)) or not patterns:
        raise ValueError(
            f"set_recipe: modules={modules!r}: patterns on module paths are needed, as 'layers.0.*'; "
            "leave modules out for the whole model"
        )
    return tuple(patterns)


def _for_all(now: Recipe, recipe: Any) -> Recipe:
    found = Recipe.resolve(recipe, now.changed({"modules": {}}))
    if isinstance(recipe, Recipe) or (isinstance(recipe, Mapping) and "preset" not in recipe):
        return found
    written = (
        single({key: value for key, value in recipe.items() if key != "preset"})
        if isinstance(recipe, Mapping)
        else {}
    )
    return found.changed({name: value for name, value in now.per_graph.items() if name not in written})


def _for_some(now: Recipe, recipe: Any, patterns: Sequence[str]) -> Recipe:
    """``now`` with ``recipe`` for ``patterns``, before all others; entries at the end that repeat ``now`` are dropped."""
    earlier = {pattern: other for pattern, other in now.modules.items() if pattern not in patterns}
    new = now.changed({"modules": {**dict.fromkeys(patterns, recipe), **earlier}})
    pairs = list(new.modules.items())
    top = new.changed({**OF_COMPILING, "modules": {}})
    while pairs and pairs[-1][1] == top:
        pairs.pop()
    return new.changed({"modules": dict(pairs)})


def _install(compiled: nn.Module, root: nn.Module, now: CompiledWith, new: Recipe) -> None:
    """Give the module the Dynamo context of a fresh torch.compile with the new recipe, in that recipe's region."""
    regions = _regions.setdefault(root, {now.recipe: private.region_of(private.context_of(compiled))})
    arguments = {**now.arguments(new), **_isolation(root, now, new not in regions)}
    if isinstance(compiled, private.OptimizedModule):
        fresh: Any = torch.compile(root, **arguments)
        private.use_region(fresh.dynamo_ctx, regions.setdefault(new, private.region_of(fresh.dynamo_ctx)))
        compiled.dynamo_ctx = fresh.dynamo_ctx
        compiled._initialize()
    else:
        compiled.compile(**arguments)
        context = private.context_of(compiled)
        private.use_region(context, regions.setdefault(new, private.region_of(context)))


def _ran(root: nn.Module) -> int:
    """How many recipes models of this class have run."""
    return sum(len(recipes) for model, recipes in _regions.items() if type(model).forward is type(root).forward)


def _isolation(root: nn.Module, now: CompiledWith, first_time: bool) -> dict[str, bool]:
    """The argument that opens a region of its own for a recipe that runs for the first time.

    Raises:
        ValueError: this torch has no regions, and the recipe could be one more than Dynamo compiles for a piece of code.
    """
    if private.HAS_REGIONS:
        return {"isolate_recompiles": True} if first_time else {}
    limit = now.others.get("recompile_limit") or private.dynamo_config.recompile_limit
    if first_time and _ran(root) >= limit:
        gc.collect()  # models that are gone but for a cycle count no more, here and for Dynamo
    if first_time and (ran := _ran(root)) >= limit:
        raise ValueError(
            f"set_recipe: models of the class {type(root).__name__} have run {ran} recipes, and this torch "
            f"({torch.__version__}) compiles a piece of code no more than {limit} times. Raise "
            "torch._dynamo.config.recompile_limit first"
        )
    return {}


def _check(patterns: Sequence[str], root: nn.Module) -> None:
    names = [*module_names(root).values()]
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(in_module(name, pattern) for name in names):
            close = nearest(str(pattern), names, listed=False)
            raise ValueError(f"set_recipe: no module of this {type(root).__name__} matches {pattern!r}.{close}")


def _not_ours(compiled: object) -> str:
    cure = (
        'compile it first: model = torch.compile(model, backend="fp8compile") or model.compile(backend="fp8compile")'
    )
    if not isinstance(compiled, nn.Module):
        said = "set_recipe takes a compiled module, not a"
        wrap = "a function has no parameters to be known by: put its body into the forward of a module"
        return f"{said} {type(compiled).__name__} ({wrap if callable(compiled) else 'a module'}); {cure}"
    name = type(getattr(compiled, "_orig_mod", compiled)).__name__
    if isinstance(compiled, private.OptimizedModule) or compiled._compiled_call_impl is not None:
        return f"set_recipe: this {name} is compiled by another backend than fp8compile; {cure}"
    inside = [path for path, m in compiled.named_modules() if path and running(m) is not None]
    if inside:
        return f"set_recipe: this {name} is not compiled itself; call it for each of those in it: {', '.join(inside)}"
    return f"set_recipe: this {name} is not compiled; {cure}"
