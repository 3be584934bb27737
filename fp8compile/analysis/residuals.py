"""Values computed from several tensors and read on both sides of a matmul: residuals that had better be stored.

    x = x0 + a;   b = norm(x) @ w;   y = x + b        x is read before the matmul and after it

See passes/store_residuals.py, which has them stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from torch.fx import Graph, Node

from fp8compile.fx.graph import SAVED_AS_CODES, TAKEN_AS_CODES, is_tensor, nbytes
from fp8compile.fx.ops import CASTS, contracts, is_pointwise, is_read_from_memory, is_view

LAYOUT_IS_CHOSEN = 4  # dimensions: channels come first or last


def stored_residuals(residuals: Iterable[Node], plain_stores: Callable[[Node], bool]) -> list[Node]:
    """Of the ``residuals`` of a graph, in their order, those that take fewer bytes to read than to compute again.

    ``plain_stores`` says which values plain Inductor would store, and only codes of them are stored here.
    """
    found: dict[Node, None] = {}
    for node in residuals:
        if plain_stores(node) and _bytes_read(node, found) > nbytes(node.meta["val"]):
            found[node] = None
    return list(found)


def is_stored_as_codes(node: Node) -> bool:
    """Whether only codes are stored of a value that plain Inductor would store itself."""
    return bool(node.meta.keys() & {SAVED_AS_CODES, TAKEN_AS_CODES})


def residuals_of(graph: Graph, saved_is_stored: bool = True) -> list[Node]:
    """The values of a graph that are read on both sides of a matmul, each as the smallest of it and what it is cast from.

    Left out is what is stored anyway. ``saved_is_stored`` says whether that holds of all that the graph returns.
    """
    end = None if saved_is_stored else graph.output_node()
    return list(dict.fromkeys(_read_on_both_sides(graph, end)))


def _read_on_both_sides(graph: Graph, end: Node | None) -> Iterator[Node]:
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
            read = [behind_casts(operand, end) for operand in node.all_input_nodes if is_tensor(operand)]
            yield from (made for made in read if made and bit.get(made, 0) & across[node])
        if is_pointwise(node) and is_tensor(node) and node.meta["val"].ndim != LAYOUT_IS_CHOSEN:
            bit[node] = 1 << len(bit)


def behind_casts(node: Node, end: Node | None) -> Node | None:
    """The node to store: the smallest of a value and what it is cast or viewed from; None if one of them is stored anyway."""
    found = [node]
    while is_view(node) or node.target in CASTS:
        node = node.all_input_nodes[0]
        found.append(node)
    if any(is_read_from_memory(made, end) for made in found):
        return None
    return min((made for made in found if not is_view(made)), key=lambda made: nbytes(made.meta["val"]), default=None)


def _bytes_read(node: Node, stored: Collection[Node]) -> int:
    """Bytes of the tensors in memory that a kernel reads to recompute a value."""
    seen, open_, total = {node}, [node], 0
    while open_:
        for operand in open_.pop().all_input_nodes:
            if operand in seen or not is_tensor(operand):
                continue
            seen.add(operand)
            if (is_pointwise(operand) or is_view(operand)) and operand not in stored:
                open_.append(operand)
            else:
                total += nbytes(operand.meta["val"])
    return total
