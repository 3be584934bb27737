"""``Recipe.fp32.keep``: patterns on modules and operations that the user wants in FP32.

``"blocks.1.attn"`` is a module and all in it, ``"aten.exp"`` an operation (as in aten, without overload) wherever it is;
both are fnmatch patterns. An operation has the name that the user called, not the names of what it was decomposed into.
"""

from __future__ import annotations

import fnmatch

from torch.fx import Graph, Node

from fp8compile._messages import nearest
from fp8compile.fx.provenance import module_path
from fp8compile.islands.policy import name_of
from fp8compile.recipe.context import Context
from fp8compile.recipe.patterns import in_module

ATEN = "aten."


def kept_fp32(node: Node, ctx: Context) -> str | None:
    """The first pattern of ``Recipe.fp32.keep`` that matches a node of the forward or the backward."""
    path, op = module_path(node), f"{ATEN}{name_of(node)}"
    patterns, spellings = ctx.recipe_at(path).fp32.keep, ctx.place.spellings(path)
    return next((p for p in patterns if any(_matches(p, spelled, op) for spelled in spellings)), None)


def _matches(pattern: str, module: str, op: str) -> bool:
    return fnmatch.fnmatchcase(op, pattern) if pattern.startswith(ATEN) else in_module(module, pattern)


def unmatched(graph: Graph, ctx: Context) -> list[str]:
    """The patterns of the recipe that match nothing in a graph, each with the nearest names that would."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    named = [(spelled, f"{ATEN}{name_of(n)}") for n in nodes for spelled in ctx.place.spellings(module_path(n))]
    modules = {path for spelled, _ in named for path in _with_parents(spelled)}
    ops = {f"{ATEN}{name}" for n in nodes if (name := name_of(n))}
    found = []
    for pattern in ctx.recipe.fp32.keep:
        if not any(_matches(pattern, *each) for each in named):
            known = ops if pattern.startswith(ATEN) else modules
            found.append(f"{pattern!r}.{nearest(pattern, known)}")
    return found


def _with_parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))] if path else []
