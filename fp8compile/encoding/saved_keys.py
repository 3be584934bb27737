"""What a choice of bits recognises the saved values of a graph by (``fp8compile/recipe/saved_bits.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.fx import Node

from fp8compile.fx.graph import SAVED_KEY
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.regions import saves_itself
from fp8compile.recipe.context import Context
from fp8compile.recipe.saved_bits import Key


def keys_of(split: PartitionedGraph, ctx: Context) -> Mapping[Node, Key]:
    """The key of each value that a graph saves itself.

    Keys are counted once, before a memory budget gives values up, and stay in the meta of their nodes: a value that is saved
    later in the place of another has none.
    """
    ours = [edge for edge in split.edges if saves_itself(split, edge)]
    if not any(SAVED_KEY in edge.forward.meta for edge in ours):
        _count(ours, ctx)
    return {edge.forward: edge.forward.meta[SAVED_KEY] for edge in ours if SAVED_KEY in edge.forward.meta}


def _count(edges: list[SavedTensor], ctx: Context) -> None:
    plain = [Key(ctx.place.from_core(e.info.origin.module), e.info.origin.op, e.info.dtype) for e in edges]
    of, seen = Counter(plain), Counter[Key]()
    for edge, key in zip(edges, plain, strict=True):
        edge.forward.meta[SAVED_KEY] = key._replace(nth=seen[key], of=of[key])
        seen[key] += 1
