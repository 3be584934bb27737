"""The gradient of a gathered entry of each row, computed for some of the columns.

    forward   z.gather(-1, index)                      one entry a row, index [..., 1]
    backward  scatter_add(zeros [..., V], index, g)    g [..., 1] at that entry, 0 at all others
              columns c alone: where(c == index, g, 0) one comparison a column
              its sum over all columns: g              as far as it is read by itself

So what PyTorch writes as zeros and one store a row is an operation element by element, which can be cut into columns or rows.
The numbers are the same: one term of the sum is g, all others are 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.analysis.logits import descendants
from fp8compile.fx.graph import is_tensor, splice
from fp8compile.fx.ops import CASTS

aten = torch.ops.aten


def one_entry_a_row(node: Node) -> tuple[Node, Node] | None:
    """Index and entries of a value that is zero but for one entry in each row of its last dimension; None for any other."""
    if node.target is not aten.scatter_add.default:
        return None
    zeros, dim, index, entries = node.args
    shape = node.meta["val"].shape
    rows = (*shape[:-1], 1)
    if not (is_tensor(index) and is_tensor(entries) and dim in (-1, len(shape) - 1) and _is_zero(zeros)):
        return None
    fits = all(tuple(o.meta["val"].shape) == rows for o in (index, entries))  # type: ignore[union-attr]
    return (index, entries) if fits else None  # type: ignore[return-value]


def _is_zero(node: Any) -> bool:
    while node.target in CASTS:
        node = node.args[0]
    return node.target is aten.full.default and node.args[1] == 0


def in_columns(columns: range, index: Tensor, entries: Tensor) -> Tensor:
    """These columns of the value of which ``index`` and ``entries`` are ``[..., 1]``."""
    at = torch.arange(columns.start, columns.stop, device=index.device)
    return torch.where(index == at, entries, torch.zeros((), dtype=entries.dtype, device=entries.device))


def spell_out(graph: Graph, nodes: Iterable[Node]) -> None:
    """Let nobody read these values as zeros that entries are stored into: sums take the entries, others compare columns."""
    found = {node: pair for node in nodes if (pair := one_entry_a_row(node))}
    later = descendants([*found])
    for node in [n for n in graph.nodes if n in later]:
        if (entries := _summed(node, found)) is not None:
            node.replace_all_uses_with(splice(graph, _like(node.meta["val"]), entries, before=node))
    for node in reversed([n for n in graph.nodes if n in later or n in found]):
        if not (node.users or node.op == "output" or node.is_impure()):
            graph.erase_node(node)
        elif node in found:
            columns = range(node.meta["val"].shape[-1])
            node.replace_all_uses_with(splice(graph, _by_comparison(columns), *found[node], before=node))
            graph.erase_node(node)


def _summed(node: Node, found: dict[Node, tuple[Node, Node]]) -> Node | None:
    """The entries, where a node is the sum over the columns of such a value, or of one that is cast."""
    if node.target is not aten.sum.dim_IntList:
        return None
    operand: Any = node.args[0]
    over = [d % operand.meta["val"].dim() for d in node.args[1]]  # type: ignore[union-attr]
    while operand.target in CASTS:
        operand = operand.args[0]
    return found[operand][1] if operand in found and over == [operand.meta["val"].dim() - 1] else None


def _like(value: Tensor) -> Any:
    shape, dtype = tuple(value.shape), value.dtype

    def sum_of_one_entry_a_row(entries: Tensor) -> Tensor:
        return entries.to(dtype).reshape(shape)

    return sum_of_one_entry_a_row


def _by_comparison(columns: range) -> Any:
    def entries_by_column(index: Tensor, entries: Tensor) -> Tensor:
        return in_columns(columns, index, entries)

    return entries_by_column
