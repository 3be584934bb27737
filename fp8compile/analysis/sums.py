"""Sums of values: what of a graph only adds some values up.

root = ((a + b) + x) + c       of a, b and c the others are x; each of a, b, c and of the partial sums has one reader
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from fp8compile.fx.ops import CASTS, RESHAPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """A node that is the sum of some values and others.

    Attributes:
        root: the sum.
        others: what it adds to the values that were asked for, in order.
        chain: the reshapes and casts between the first of the values and the additions.
        inside: all nodes between the values and the sum; nothing else reads them.
    """

    root: Node
    others: tuple[Node, ...]
    chain: tuple[Node, ...]
    inside: frozenset[Node]


def sum_of(values: Iterable[Node]) -> Sum | None:
    """The smallest sum that holds all these values, or reshapes or casts of them; None where anything else reads one of them
    or a partial sum, or where they differ in shape or dtype."""
    chains = [[value, *_views_of(value)] for value in values]
    paths = [_sums_above(chain[-1]) for chain in chains]
    root = next((node for node in paths[0] if all(node in path for path in paths)), None)
    if root is None:
        return None
    sums = {node for path in paths for node in path[: path.index(root) + 1]}
    others = tuple(leaf for leaf in _leaves(root, sums) if all(leaf is not chain[-1] for chain in chains))
    views = [view for chain in chains for view in chain[1:]]
    return Sum(root, others, tuple(chains[0][1:]), frozenset((*sums, *views)) - {root})


def _views_of(value: Node) -> list[Node]:
    """The chain of reshapes and casts that a value goes through; each result has one reader."""
    found = list[Node]()
    while (user := _only_reader(value)) is not None and (user.target in RESHAPES or user.target in CASTS):
        found.append(user)
        value = user
    return found


def _sums_above(value: Node) -> list[Node]:
    """The additions that a value goes into, one after the other, as long as each result has one reader."""
    found = list[Node]()
    while (user := _only_reader(value)) is not None and _is_plain_sum(user):
        found.append(user)
        value = user
    return found


def _only_reader(value: Node) -> Node | None:
    """The one node that reads a value, once."""
    users = list(value.users)
    return users[0] if len(users) == 1 and users[0].all_input_nodes.count(value) == 1 else None


def _is_plain_sum(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    left, right = node.args
    operands = isinstance(left, Node) and isinstance(right, Node) and left is not right
    return operands and all(_is_like(each, node) for each in node.all_input_nodes)


def _is_like(a: Node, b: Node) -> bool:
    return bool(a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].dtype == b.meta["val"].dtype)


def _leaves(node: Node, inside: set[Node]) -> list[Node]:
    if node not in inside:
        return [node]
    return [leaf for operand in node.all_input_nodes for leaf in _leaves(operand, inside)]
