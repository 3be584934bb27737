"""Codes of several weights side by side, for matmuls that take them as one matrix (``Recipe.linears.merge_dgrads``).

    [K, N1 + N2 + ...]      the transposed codes of weights [N1, K], [N2, K], ..., each under its own scale

They take the place of the weights' own transposed codes, so they hold no memory in addition. They are made anew as soon as
one of the weights has new codes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from typing import NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

Codes = tuple[Tensor | None, Tensor | None, Tensor]  # of a weight: by rows, transposed, inv_scale


def of_one_input(gm: GraphModule, weights: Collection[int]) -> list[tuple[int, ...]]:
    """The weights at these positions of a Dynamo graph that linears of one value take, where they are several."""
    position = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    reading: dict[Node, set[int]] = defaultdict(set)
    for node in gm.graph.find_nodes(op="call_function", target=F.linear):
        x, weight = (*node.args, None)[:2]
        if isinstance(x, Node) and isinstance(weight, Node) and position.get(weight) in weights:
            reading[x].add(position[weight])
    return list(dict.fromkeys(tuple(sorted(found)) for found in reading.values() if len(found) > 1))


def side_by_side(codes: Sequence[Tensor]) -> Tensor:
    """Codes ``[N, K]`` of several weights as one matrix ``[K, N1 + N2 + ...]``."""
    raw = [each.view(torch.uint8).t() for each in codes]
    return torch.cat(raw, 1).view(codes[0].dtype)


class Packs:
    """Packed codes of the weights that are alive, by the first weight of a pack."""

    def __init__(self) -> None:
        self._kept: MutableMapping[Tensor, dict[tuple[int, ...], _Pack]] = WeakTensorKeyDictionary()

    def up_to_date(self, weights: Sequence[Tensor], made: Sequence[Codes]) -> tuple[Tensor, Tensor]:
        """The packed codes of weights whose codes are these, and the largest of their scales."""
        codes = [by_rows for by_rows, _, _ in made if by_rows is not None]
        kept, key = self._kept.setdefault(weights[0], {}), tuple(map(id, weights))
        if key not in kept or not kept[key].is_of(codes):
            largest = torch.cat([inv_scale for _, _, inv_scale in made]).amax(0, keepdim=True)
            made_of = tuple((ref(each), each._version) for each in codes)
            kept[key] = _Pack(made_of, side_by_side(codes), largest)
        return kept[key].packed, kept[key].inv_scale

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drop the packs that begin with one of these weights."""
        for weight in weights:
            self._kept.pop(weight, None)

    def bytes_of(self, weights: Iterable[Tensor]) -> int:
        """Bytes of the packs that begin with one of these weights."""
        packs = (pack for weight in weights for pack in self._kept.get(weight, {}).values())
        return sum(pack.packed.nbytes + pack.inv_scale.nbytes for pack in packs)


class _Pack(NamedTuple):
    """Packed codes, and what they were made of, which lives no longer because of them, in which version: a whole step writes
    new codes over those it has read."""

    made_of: tuple[tuple[ref[Tensor], int], ...]
    packed: Tensor
    inv_scale: Tensor

    def is_of(self, codes: Sequence[Tensor]) -> bool:
        pairs = zip(self.made_of, codes, strict=True)
        return all(made() is each and version == each._version for (made, version), each in pairs)
