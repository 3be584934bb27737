"""Numbers stay as they are but for one rounding, to a value's own dtype. A residual read on both sides of a matmul is stored.

    x = x0 + a                [rows, C]     saved for backward as codes alone
    b = norm(x) @ w
    y = x + b                               Inductor: y = x0 + a + b;  then z = x0 + a + b + c, and so on

Inductor recomputes a pointwise value in every kernel that reads it, until that takes more tensors than its option allows
(``realize_reads_threshold``). Plain Inductor stores each ``x`` all the same, because the backward reads it. Here codes are
saved instead, so each norm would read the results of all matmuls since the last ``x`` in memory. That is more bytes than a
store and a load, results that stay allocated until then, and a kernel of its own for each of several layers that are alike.
So ``x`` is stored.

Left as they are: what is not saved, which plain Inductor does not store either; values stored anyway, since a matmul or the
caller reads them; values that take no more bytes to compute than to read, as a decode or an activation of one tensor does;
tensors of four dimensions, whose memory format Inductor chooses.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.liveness import is_read_from_memory
from fp8compile.fx.graph import SAVED_AS_CODES, TAKEN_AS_CODES, is_tensor, nbytes
from fp8compile.fx.ops import CASTS, contracts, is_pointwise, is_view
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

LAYOUT_IS_CHOSEN = 4  # dimensions: channels come first or last


def store_residuals(graph: Graph, ctx: Context) -> Notes:
    """Let Inductor store values computed from several tensors and read both before a matmul and after it."""
    if ctx.recipe.rewrites_graph:
        for node in dict.fromkeys(_read_on_both_sides(graph)):
            if node.meta.keys() & {SAVED_AS_CODES, TAKEN_AS_CODES} and _bytes_read(node) > nbytes(node.meta["val"]):
                node.meta[private.STORED] = True
    return Notes()


def _read_on_both_sides(graph: Graph) -> Iterator[Node]:
    """Pointwise values that an operation reads, and also depends on through a matmul. Sets of nodes are bits of integers."""
    bit: dict[Node, int] = {}
    behind: dict[Node, int] = {}  # what a node is computed from
    across: dict[Node, int] = {}  # what of that has a matmul on the way
    for node in graph.nodes:
        behind[node] = across[node] = 0
        for operand in node.all_input_nodes:
            behind[node] |= behind[operand] | bit.get(operand, 0)
            across[node] |= across[operand]
        if contracts(node):
            across[node] |= behind[node]
        elif is_pointwise(node):
            read = [_behind_casts(operand) for operand in node.all_input_nodes]
            yield from (made for made in read if made and bit.get(made, 0) & across[node])
        if is_pointwise(node) and is_tensor(node) and node.meta["val"].ndim != LAYOUT_IS_CHOSEN:
            bit[node] = 1 << len(bit)


def _behind_casts(node: Node) -> Node | None:
    """The node to store: the smallest of a value and what it is cast or viewed from; None if one of them is stored anyway."""
    found = [node]
    while is_view(node) or node.target in CASTS:
        node = node.all_input_nodes[0]
        found.append(node)
    if any(map(is_read_from_memory, found)):
        return None
    return min((made for made in found if not is_view(made)), key=lambda made: nbytes(made.meta["val"]), default=None)


def _bytes_read(node: Node) -> int:
    """Bytes of the tensors in memory that a kernel reads to recompute a value."""
    seen, open_, total = {node}, [node], 0
    while open_:
        for operand in open_.pop().all_input_nodes:
            if operand in seen or not is_tensor(operand):
                continue
            seen.add(operand)
            if (is_pointwise(operand) or is_view(operand)) and private.STORED not in operand.meta:
                open_.append(operand)
            else:
                total += nbytes(operand.meta["val"])
    return total
