"""Which values of the forward the backward can make again, and from which others.

    value --back through operations of aten and prims--> values that are kept, parameters, the caller's data

An operation may be repeated if it is a pure function of its operands: of aten or prims, functional, no random numbers, no
collective, no higher-order operator. Its operands must reach the backward: a value that is kept, a parameter or data that the
forward does not overwrite, or what can itself be made again. A value that is kept as codes comes back rounded, and what is
made from it with it.

Attention with dropout draws from its own generator, so it is never repeated. Dropout by itself can be: its seed is kept, and
the numbers are a function of the seed (``SEEDED`` in fx/ops.py).
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.cost.op_cost import is_priced
from fp8compile.fx.ops import SEEDED, draws_random_numbers, is_collective, is_mutating
from fp8compile.fx.partition import PartitionedGraph


class Repeatable:
    """What can be made again in the backward of one partitioned graph, which must not change meanwhile."""

    def __init__(self, split: PartitionedGraph) -> None:
        self.split = split
        self._order = {node: i for i, node in enumerate(split.fw.graph.nodes)}

    def made_from(
        self, values: Set[Node], kept: Set[Node], repeated: Set[Node], without: Set[Node] = frozenset()
    ) -> set[Node] | None:
        """The operations, beside those ``repeated`` already, that make ``values`` from what is ``kept`` and not ``without``.

        None if there is no such way.
        """
        found: set[Node] = set()
        waiting = [v for v in values if v not in repeated]
        while waiting:
            node = waiting.pop()
            is_kept = node in kept and node not in without
            if node in found or node in repeated or is_kept or self.split.costs_nothing_to_keep(node):
                continue
            if not self.is_pure(node):
                return None
            found.add(node)
            waiting.extend(node.all_input_nodes)
        return found

    def in_order(self, nodes: Set[Node]) -> list[Node]:
        """``nodes`` as the forward has them."""
        return sorted(nodes, key=self._order.__getitem__)

    def position(self, node: Node) -> int:
        """Where ``node`` stands in the forward."""
        return self._order[node]

    def is_pure(self, node: Node) -> bool:
        """Whether repeating the operation on the same operands gives the same result."""
        target = node.target
        if target is private.getitem or target in SEEDED:
            return True
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
            return False
        if is_mutating(node) or draws_random_numbers(node):
            return False
        if (target.namespace == "prims" and "inductor" in str(target)) or is_collective(node):
            return False
        return is_priced(node)
