"""What a decoder needs beside codes, as the backward has it: statistics of norms, and sizes.

saved already       by the cut, for the norm's own backward
computed again      by the backward, from exact values: |x| + eps beside a saved |x|
kept for the codes  else; its bytes are those of the codes
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from fp8compile.analysis.recomputed import Same
from fp8compile.fx.graph import computed_from_any, is_size, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.saved.stored import Stored


class KeptBeside:
    """Finds what decoders need; counts what is kept for them."""

    def __init__(self, split: PartitionedGraph, same: Same, codes: Iterable[SavedTensor]) -> None:
        """``same`` as in ``recomputed``; ``codes`` are all values that the backward will have as codes."""
        self.split = split
        inexact = computed_from_any(edge.backward for edge in codes)
        made = {late: early for late, early in same.items() if late not in inexact and late.op == "call_function"}
        self._again = {early: late for late, early in made.items()}
        self._kept: set[Node] = set()

    def nbytes(self, stored: Stored) -> int:
        """Bytes that are kept for this value's codes and for none before."""
        new = [node for node in (stored.about.statistics if stored.about else ()) if self._is_missing(node)]
        self._kept.update(new)
        return sum(nbytes(node.meta["val"]) for node in new)

    def in_backward(self, node: Node, before: Node) -> Node:
        """A statistic or a size of the forward as the backward has it ``before`` a reader."""
        if is_size(node):
            return self.split.keep_size(node)
        if (edge := self._edge_of(node)) is not None:
            return edge.backward
        if node in self._again:
            return _moved(self._again[node], before)
        return self.split.keep(node, f"beside_{node.name}")

    def _is_missing(self, node: Node) -> bool:
        known = self._edge_of(node) is not None or node in self._again or node in self._kept
        return not known and not self.split.caller_owns(storage_root(node))

    def _edge_of(self, node: Node) -> SavedTensor | None:
        return next((edge for edge in self.split.edges if edge.forward is node), None)


def _moved(node: Node, before: Node) -> Node:
    """A node and what it is made of, where ``before`` can read it."""
    waiting, behind = [node], set[Node]()
    while waiting:
        each = waiting.pop()
        if before < each and each not in behind:
            behind.add(each)
            waiting += each.all_input_nodes
    for each in sorted(behind):
        before.prepend(each)
    return node
