"""How a module was compiled: the current recipe and the other arguments of torch.compile, read back from Dynamo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.backend import compile_graph, fp8compile
from fp8compile.recipe.from_file import recipe_of
from fp8compile.recipe.recipe import Recipe


@dataclass(frozen=True)
class RecipeBackend:
    """The backend for one recipe, with a mode beside it, which torch.compile's ``options`` exclude.

    Equal recipes are equal backends, so Dynamo runs for both what it compiled for one. ``first`` are the arguments that
    the user gave to torch.compile, kept for the way back. ``isolated`` says whether they asked for a region of their own.
    """

    recipe: Recipe
    mode: str | None
    first: Mapping[str, Any] = field(compare=False)
    isolated: bool = field(default=False, compare=False)

    __name__ = "fp8compile"

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, self.recipe, self.mode)


@dataclass(frozen=True)
class CompiledWith:
    """The arguments that torch.compile got for a module.

    Attributes:
        recipe: the recipe that runs.
        first: ``backend``, ``options`` and ``mode`` as the user gave them.
        others: the other arguments: ``dynamic``, ``fullgraph`` and so on.
    """

    recipe: Recipe
    first: Mapping[str, Any]
    others: Mapping[str, Any]

    def arguments(self, recipe: Recipe) -> dict[str, Any]:
        """The arguments of torch.compile that select ``recipe`` and change nothing else."""
        others = dict(self.others)
        filter_fn = others.pop("guard_filter_fn", None)
        arguments = dict(self.first)
        if recipe != recipe_of(arguments["options"]):
            backend = RecipeBackend(recipe, arguments["mode"], self.first, "isolate_recompiles" in others)
            arguments = {"backend": backend, "options": None, "mode": None}
        if filter_fn is not None:  # passed in the options, from which torch.compile takes it out
            arguments["options"] = {**(arguments["options"] or {}), "guard_filter_fn": filter_fn}
        return {**arguments, **others}


def running(module: nn.Module) -> CompiledWith | None:
    """How ``module`` itself was compiled, wrapped or in place; None where fp8compile did not compile it.

    Raises:
        ValueError: its options do not describe a recipe.
    """
    context = private.context_of(module)
    callback = getattr(context, "callback", None)
    wrapper: Any = private.innermost_backend(callback) if callable(callback) else None
    backend = getattr(wrapper, "compiler_fn", None)
    if isinstance(backend, RecipeBackend):
        return CompiledWith(backend.recipe, backend.first, _others(context, wrapper))
    if backend is not fp8compile:
        return None
    first = {"backend": backend, "mode": wrapper.kwargs.get("mode"), "options": wrapper.kwargs.get("options")}
    return CompiledWith(recipe_of(first["options"]), first, _others(context, wrapper))


def active_recipes(module: nn.Module) -> set[Recipe]:
    """The recipes of ``module`` and of the modules in it that are compiled by themselves."""
    return {found.recipe for m in module.modules() if (found := running(m)) is not None}


def compiled_inside(module: nn.Module) -> list[nn.Module]:
    """The modules in it that fp8compile compiles each by itself; none where ``module`` itself is compiled."""
    if running(module) is not None:
        return []
    return [m for m in module.modules() if m is not module and running(m) is not None]


@contextlib.contextmanager
def compiled_by(backend: Callable[..., Any], modules: Iterable[nn.Module]) -> Iterator[None]:
    """These modules, each compiled by itself, compiled by another backend."""
    with contextlib.ExitStack() as undo:
        for module in modules:
            if isinstance(module, private.OptimizedModule):
                whole: Any = torch.compile(module._orig_mod, backend=backend)
                name, again = "forward", whole.forward
            else:
                name, again = "_compiled_call_impl", torch.compile(module._call_impl, backend=backend)
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, again)
        yield


def _others(context: Any, wrapper: Any) -> dict[str, Any]:
    """The given arguments that are not part of the backend (some are newer than torch 2.11)."""
    convert = getattr(context.callback, "_torchdynamo_orig_backend", None)
    backend = wrapper.compiler_fn
    ours = isinstance(backend, RecipeBackend)  # then set_recipe made the region, or took over the user's
    optional = {
        "guard_filter_fn": getattr(getattr(context, "_hooks", None), "guard_filter_fn", None),
        "recompile_limit": getattr(convert, "_recompile_limit", None),
        "isolate_recompiles": backend.isolated if ours else private.region_of(context) != -1,
        "shapes_spec": getattr(context, "_shapes_spec", None),
    }
    return {
        "dynamic": wrapper.dynamic,
        "fullgraph": context.fullgraph,
        **{name: value for name, value in optional.items() if value},
    }
