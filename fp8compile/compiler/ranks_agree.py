"""Recipes that differ across ranks, named when a graph compiles: in the first step.

    store["fp8compile/recipe/<graph>/<n>"]      the n-th recipe of a graph: that of the rank that came first, and its number
    every rank                                  puts its own there if nothing is there (compare_set), and reads what is

A collective within a compilation would wait for ranks that compile nothing, or something else (stages of a pipeline, one rank
with an uneven batch). A store waits for nobody: each question is answered at once by what is there. Its answers have one
order. So of two ranks that differ, the later one sees the earlier one's recipe, whichever it is. A rank asks once for each
graph and recipe, so the traffic is one small message each, however many ranks there are.

A graph is known by the paths of its parameters. It may have several recipes one after the other (``set_recipe``), hence <n>.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from fp8compile.recipe.recipe import Recipe

log = logging.getLogger("fp8compile")

DIFFER = (
    "recipes differ across ranks: {} was compiled with {} on rank {} and with {} on rank {}. Each rank trains by its own. "
    "Give torch.compile the same options on all ranks"
)
MOST = 3  # paths that a message names

_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, list[str]]] = weakref.WeakKeyDictionary()


def difference(recipe: Recipe, paths: Sequence[str]) -> str | None:
    """What another rank that came first compiled the same graph with, where that is another recipe.

    Args:
        recipe: what this rank compiles with.
        paths: of the graph's parameters.

    Returns:
        A sentence that names both ranks and both recipes; None where they agree, where this rank is the first to come, or
        where torch.distributed is not in use. Never waits for another rank. A store that does not answer is no error here.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None or not paths:
        return None
    graph = hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()[:16]
    known = _asked.setdefault(group, {}).setdefault(graph, [])
    if recipe.key in known:
        return None
    known.append(recipe.key)
    mine = {"key": recipe.key, "text": str(recipe), "rank": dist.get_rank()}
    try:
        said = group.get_group_store().compare_set(f"fp8compile/recipe/{graph}/{len(known)}", "", json.dumps(mine))
    except (RuntimeError, NotImplementedError) as error:
        log.info("recipes of ranks were not compared: the store does not answer (%s)", error)
        return None
    first = json.loads(said)
    if first["key"] == recipe.key:
        return None
    return DIFFER.format(_named(paths), recipe, dist.get_rank(), first["text"], first["rank"])


def _named(paths: Sequence[str]) -> str:
    shown = ", ".join(sorted(paths)[:MOST])
    return f"the graph of {shown}" + (f" and {len(paths) - MOST} more" if len(paths) > MOST else "")
