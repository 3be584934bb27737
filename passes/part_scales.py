"""Numbers stay as they are. A known scale is a tensor of its own, not a place in the tensor of all scales (delayed scaling).

    scales[i : i + 1][:, :1]    ->    fp8compile.first_of_rows(scales, [..., i, ...])[k]

A kernel that reads the place holds its number, so each layer had kernels of its own: 3 layers of a Llama 18 in the forward,
where 11 differ in more than a number. The views are made in one call. What the forward only returns stays as it is.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from fp8compile.fx.graph import SPLICED, insertion_point_after, is_tensor
from fp8compile.fx.rows_apart import FIRST_OF_ROWS
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


def part_scales(graph: Graph, ctx: Context) -> Notes:
    """Make each scale that the graph reads an operand of its own."""
    for scales in graph.find_nodes(op="placeholder"):
        found = {each: row for each, row in _first_elements(scales).items() if _is_read(each)}
        if found:
            _take_apart(scales, found)
    return Notes()


def _first_elements(scales: Node) -> dict[Node, int]:
    """What passes took of ``scales`` as ``[1, 1]``: the row of each."""
    found = dict[Node, int]()
    for row in scales.users:
        at = _one_of(row, 0)
        if at is not None:
            found |= {first: at for first in row.users if _one_of(first, 1) == 0}
    return found


def _one_of(node: Node, dim: int) -> int | None:
    """``i``, if ``node`` is ``x[i : i + 1]`` along this dimension of a matrix, put there by a pass."""
    if node.target is not aten.slice.Tensor or SPLICED not in node.meta or len(node.args) != 4:
        return None
    of, along, start, end = node.args
    if along != dim or not isinstance(start, int) or not is_tensor(of) or end != start + 1:
        return None
    return start if of.meta["val"].dim() == 2 else None  # type: ignore[union-attr]


def _is_read(node: Node) -> bool:
    return any(user.op != "output" for user in node.users)


def _take_apart(scales: Node, found: dict[Node, int]) -> None:
    graph, rows = scales.graph, sorted(set(found.values()))
    with graph.inserting_before(insertion_point_after(scales)):
        every = graph.call_function(FIRST_OF_ROWS, (scales, rows))
        parts = {row: graph.call_function(operator.getitem, (every, at)) for at, row in enumerate(rows)}
    for first, row in found.items():
        parts[row].meta |= first.meta
        first.replace_all_uses_with(parts[row])
        taken = first.args[0]
        graph.erase_node(first)
        if isinstance(taken, Node) and not taken.users:
            graph.erase_node(taken)
    every.meta["val"] = [parts[row].meta["val"] for row in rows]
