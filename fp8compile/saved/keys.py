"""What a choice of bits recognises the saved values of a graph by (``fp8compile/recipe/saved_bits.py``)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

from torch.fx import Node

from fp8compile.fx.graph import SAVED_KEY
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.provenance import Origin, TensorInfo
from fp8compile.fx.regions import saves_itself
from fp8compile.recipe.context import Context
from fp8compile.recipe.saved_bits import MEASURE, Key
from fp8compile.reporting.entries import RECIPE, Skip

NOT_SAVED = "Recipe.saved.bits: this model does not save such a value"


def keys_of(split: PartitionedGraph, ctx: Context) -> Mapping[Node, Key]:
    """The key of each value that a graph saves itself.

    Keys are counted once, before a memory budget gives values up, and stay in the meta of their nodes: a value that is saved
    later in the place of another has none.
    """
    ours = [edge for edge in split.edges if saves_itself(split, edge)]
    if not any(SAVED_KEY in edge.forward.meta for edge in ours):
        _count(ours, ctx)
    return {edge.forward: edge.forward.meta[SAVED_KEY] for edge in ours if SAVED_KEY in edge.forward.meta}


def missing(found: Mapping[Node, Key], ctx: Context) -> tuple[Skip, ...]:
    """An entry for each value of ``Recipe.saved.bits`` that a whole model does not save. Where it saves none, it warns:
    another path of the model may have been measured, or another model."""
    bits = ctx.recipe.saved.bits
    if bits == "off" or not bits.values or not ctx.is_whole_model:
        return ()  # what one graph of several does not save another may
    gone = [value.key for value in bits.values if value.key not in found.values()]
    if len(gone) == len(bits.values):
        warnings.warn(
            f"Recipe.saved.bits: none of its {len(gone)} values is in this graph, which stores all by the rule: {gone[0]} "
            f"was the first. They were measured on another model, another version of it or another path. {MEASURE}.",
            stacklevel=2,
        )
    nowhere = Origin("-", "", "")
    return tuple(Skip(TensorInfo.without_tensor(str(key), nowhere), NOT_SAVED, RECIPE) for key in gone)


def _count(edges: list[SavedTensor], ctx: Context) -> None:
    plain = [Key(ctx.place.from_core(e.info.origin.module), e.info.origin.op, e.info.dtype) for e in edges]
    of, seen = Counter(plain), Counter[Key]()
    for edge, key in zip(edges, plain, strict=True):
        edge.forward.meta[SAVED_KEY] = key._replace(nth=seen[key], of=of[key])
        seen[key] += 1
