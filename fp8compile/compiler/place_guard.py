"""A graph that serves several modules serves those of which the recipe says the same.

Dynamo runs for a block what it compiled for another one of its class. A recipe may tell the two apart by their paths in the
model. So where a recipe goes by path, the graph gets a guard that compares what is said of each path in it. A block of which
something else is said is compiled again: once for each thing said, not once for each block.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.inline_regions import graphs_of
from fp8compile.compiler.running_model import place_from
from fp8compile.fx.provenance import module_path, parameters_of
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe

GUARD = "fp8compile: what the recipe says of the modules in this graph"


def guard_place(gm: GraphModule, example_inputs: Sequence[Any], ctx: Context) -> None:
    """Have Dynamo compile ``gm`` again for modules of which the recipe says something else than of these."""
    at, path = next(iter(parameters_of(gm, example_inputs)), (None, ""))
    if at is None or not _goes_by_path(ctx.recipe, path):
        return
    paths = sorted({module_path(node) for each in graphs_of(gm) for node in each.graph.nodes})
    private.add_guard(gm.graph.find_nodes(op="placeholder")[at], _same_said(ctx, paths, path), GUARD)


def _goes_by_path(recipe: Recipe, path: str) -> bool:
    """Whether the recipe names modules; or whether the graph is one module with parameters, a head perhaps."""
    return recipe.names_modules or "." not in path


def _same_said(ctx: Context, paths: Sequence[str], local: str) -> Callable[[Tensor], bool]:
    mine = _said(ctx, paths)
    known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def is_same(parameter: Tensor) -> bool:
        ref, same = known.get(id(parameter), (None, False))
        if ref is None or ref() is not parameter:
            there = dataclasses.replace(ctx, place=place_from({id(parameter): local}))
            same = _said(there, paths) == mine
            known[id(parameter)] = weakref.ref(parameter), same
        return same

    return is_same


def _said(ctx: Context, paths: Sequence[str]) -> list[Any]:
    return [ctx.said_of(path) for path in paths]
