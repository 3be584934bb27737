"""Numbers stay as they are but for the order of one sum. A bias gradient is summed by the kernel that makes the gradient.

    d = f(g, h)     [rows, C], which matmuls read too       reads g and h, writes d
    sum(d, 0)       [C]                                      reads d again

Inductor runs these as two kernels: a pointwise one walks along the rows, a sum over rows walks across them. In blocks of R
rows, f computed at the blocks' shape, both walk alike and are one kernel, which leaves a sum per block in FP32:

    d = f(g, h) as [rows / R, R, C];   sum(d, 1) [rows / R, C];   then sum(., 0) [C]

For GELU's backward that saves one read of the widest gradient of a layer. Other values made from the same tensors in that
kernel (GELU's value again, for the weight's gradient) are computed at the blocks' shape too, or they would read them again.
Only on a GPU: loops on a CPU fuse in another way.

A gradient whose codes and statistics are taken in blocks of rows already (fp8compile/linears/row_blocks.py) is summed in the
same blocks, whatever made it.

Left as they are: sums of values that a matmul, attention or the caller made (they have to be read anyway), of values that
depend on sums of their own row (the backward of a norm or a softmax is a kernel along rows), of values that are not stored
anyway, and small sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.graph import is_tensor, splice, storage_root
from fp8compile.fx.ops import computed_from, is_pointwise, is_read_from_memory, is_reduction, is_view
from fp8compile.linears.row_blocks import ALONG_ROWS, ROW_BLOCKS, in_blocks, operands_in_memory, sums_over_rows
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten
SUM = aten.sum.dim_IntList
# The view operations that are given a whole shape; ``RESHAPES`` of fx/ops.py has more: squeezes, aliases, detached values.
VIEW_OPS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
BLOCKS = (128, 64, 32)  # rows; the blocks' FP32 sums are 2 / R of a 16-bit gradient: 1.6 % with 128 of them
LEAST_NUMEL = 1 << 20  # with fewer elements, what was just written is still in the L2 cache


def sum_bias_gradients(graph: Graph, ctx: Context) -> Notes:
    """Put the first half of a bias gradient's sum into the kernel that makes the gradient."""
    for node in graph.find_nodes(op="call_function", target=SUM) if ctx.recipe.rewrites_graph else ():
        if rows := _rows_taken_at_once(node):
            _sum_in_blocks(graph, node, rows)
            continue
        made = storage_root(node.all_input_nodes[0])
        if not (_is_summed_by_column(node, made) and _is_blockable(made) and is_read_from_memory(made)):
            continue
        beside = _made_beside(graph, made)
        if (rows := _block(made)) and all(map(_is_blockable, beside)):
            in_blocks = {each: _compute_in_blocks(graph, each, rows) for each in (made, *beside)}
            summed = splice(graph, _summed(node.meta["val"]), in_blocks[made], before=node)
            node.replace_all_uses_with(summed)
            graph.erase_node(node)
    return Notes()


def _rows_taken_at_once(node: Node) -> int:
    """The rows of a block, where codes and statistics of what ``node`` sums over rows are taken in blocks (row_blocks.py)."""
    value, seen = node.all_input_nodes[0], node.all_input_nodes[0].meta["val"]
    if not seen.ndim:  # one number, as a loss is, has no rows
        return 0
    while ROW_BLOCKS not in value.meta and is_view(value):
        value = value.all_input_nodes[0]
    blocks = value.meta.get(ROW_BLOCKS, ALONG_ROWS)
    whole = sums_over_rows(node, seen.shape[-1]) and in_blocks(value, seen.shape[-1], blocks)
    return blocks.rows if whole and node.meta["val"].dtype == seen.dtype != torch.float64 else 0


def _sum_in_blocks(graph: Graph, node: Node, rows: int) -> None:
    total, columns = node.meta["val"], node.meta["val"].shape[-1]

    def summed(x: Tensor) -> Tensor:
        return _summed(total)(x.reshape(-1, rows, columns))

    node.replace_all_uses_with(splice(graph, summed, node.all_input_nodes[0], before=node))
    graph.erase_node(node)


def _is_summed_by_column(node: Node, made: Node) -> bool:
    """Whether ``node`` sums ``made`` over all rows, on a GPU, into a row of its dtype."""
    seen, value, total = node.args[0].meta["val"], made.meta.get("val"), node.meta["val"]  # type: ignore[union-attr]
    if not isinstance(value, Tensor) or value.device.type != "cuda" or _is_symbolic(value) or _is_symbolic(seen):
        return False
    over_rows = value.ndim > 1 and sums_over_rows(node, value.shape[-1]) and seen.is_contiguous()
    return over_rows and total.dtype == value.dtype != torch.float64


def _is_blockable(made: Node) -> bool:
    """Whether the operation that makes a value can be repeated at another shape, and does not depend on sums of its rows."""
    if not is_pointwise(made) or any(isinstance(value, Node) for value in made.kwargs.values()):
        return False
    value, operands = made.meta["val"], made.all_input_nodes
    alike = bool(operands) and all(is_tensor(t) and t.meta["val"].shape == value.shape for t in operands)
    return alike and value.is_contiguous() and not any(map(is_reduction, computed_from(made)))


def _block(made: Node) -> int:
    """Rows that are summed first; 0: too little to be worth a kernel, or no block divides the rows."""
    value = made.meta["val"]
    rows = value.numel() // value.shape[-1]
    return next((block for block in BLOCKS if rows % block == 0), 0) if value.numel() >= LEAST_NUMEL else 0


def _made_beside(graph: Graph, made: Node) -> list[Node]:
    """The other stored values of the same size that are made from a tensor of that size that ``made`` reads."""
    size, read = made.meta["val"].numel(), operands_in_memory(made)
    stored = [n for n in graph.nodes if n is not made and is_pointwise(n) and is_tensor(n) and is_read_from_memory(n)]
    same = [n for n in stored if not _is_symbolic(n.meta["val"]) and n.meta["val"].numel() == size]
    return [n for n in same if operands_in_memory(n) & read]


def _compute_in_blocks(graph: Graph, made: Node, rows: int) -> Node:
    """Compute a value at ``[rows / R, R, C]``; its readers read that, each in the shape it had. Returns the blocks."""
    operands = [arg for arg in made.args if isinstance(arg, Node)]
    blocks: Node = splice(graph, _in_blocks(made, rows), *operands, before=made)
    for like in (*reversed(_reshapes(made)), made):  # each from the blocks: a view of another shape's view is a copy
        if like.users:
            like.replace_all_uses_with(_reshaped(graph, blocks, like))
        graph.erase_node(like)
    return blocks


def _reshapes(node: Node) -> list[Node]:
    direct = [user for user in node.users if user.target in VIEW_OPS]
    return direct + [further for each in direct for further in _reshapes(each)]


def _reshaped(graph: Graph, blocks: Node, like: Node) -> Node:
    shape = like.meta["val"].shape

    def unblocked(d: Tensor) -> Tensor:
        return d.reshape(shape)

    found: Node = splice(graph, unblocked, blocks, before=like)
    return found


def _in_blocks(made: Node, rows: int) -> Callable[..., Tensor]:
    columns = made.meta["val"].shape[-1]

    def in_blocks(*operands: Tensor) -> Tensor:
        left = iter(operands)
        args: list[Any] = [next(left).reshape(-1, rows, columns) if isinstance(a, Node) else a for a in made.args]
        assert callable(made.target)
        result: Tensor = made.target(*args, **made.kwargs)
        return result

    return in_blocks


def _summed(total: Tensor) -> Callable[[Tensor], Tensor]:
    def summed(blocks: Tensor) -> Tensor:
        return blocks.sum(1, dtype=torch.float32).sum(0).to(total.dtype).reshape(total.shape)

    return summed


def _is_symbolic(value: Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in value.shape)
