"""Numbers stay as they are. Marks each saved value that ``encode_saved`` would store with all the ways to store it.

It stands in the place of ``encode_saved`` while ``fp8compile.tools.calibrate_bits`` measures: the backward runs on exact
values, or on one value at a time as it comes back from its codes. The mark is in the meta of the value's input of the
backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.fx.graph import TRIED, memory_order, nbytes, numel
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.regions import saves_itself
from fp8compile.recipe.context import Context
from fp8compile.recipe.saved_bits import WHOLE, Choice, Key
from fp8compile.reporting.entries import Notes, Skip
from fp8compile.saved.judge import Judge
from fp8compile.saved.stored import Order, Stored

MARKED = "measured: it stays exact meanwhile"


@dataclass(frozen=True)
class Tried:
    """A saved value that is to be measured.

    Attributes:
        key: what it is recognised by.
        numel: its elements.
        ways: how it may be stored, by name, from the fewest bits on; staying exact is none of them.
        nbytes: what each way takes, and the value itself.
        order, shape, dtype: of the value, as ``Stored`` takes them.
    """

    key: Key
    numel: int
    ways: Mapping[str, Stored]
    nbytes: Mapping[str, int]
    order: Order
    shape: Sequence[int]
    dtype: torch.dtype

    def came_back(self, x: Tensor, way: str) -> Tensor:
        """``x`` as it comes back from codes."""
        stored = self.ways[way]
        return stored.decode(stored.encode(x, self.order), self.order, x.shape, self.dtype)

    def choices(self, errors: Mapping[str, float]) -> tuple[tuple[str, Choice], ...]:
        """Each way with its bytes and its measured error; the value itself has none."""
        return tuple((name, Choice(taken, errors.get(name, 0.0))) for name, taken in self.nbytes.items())


def mark_saved(split: PartitionedGraph, ctx: Context) -> Notes:
    """Mark what may be stored as codes; the graph computes what it computed."""
    judge = Judge(split, ctx)
    ours = [edge for edge in split.edges if saves_itself(split, edge)]
    found = [(edge, ways) for edge in ours if (ways := judge.choices(edge))]
    for edge, ways in found:
        edge.backward.meta[TRIED] = _tried(edge, ways, judge.keys[edge.forward])
    return Notes(skips=tuple(Skip(edge.info, MARKED) for edge, _ in found))


def _tried(edge: SavedTensor, ways: Mapping[str, Stored], key: Key) -> Tried:
    value = edge.forward.meta["val"]
    size = numel(value)
    taken = {name: stored.nbytes(value) for name, stored in ways.items()} | {WHOLE: nbytes(value)}
    return Tried(key, size, ways, taken, memory_order(value), tuple(value.shape), value.dtype)
