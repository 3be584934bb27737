"""What a row of a saved value is in memory: how many dimensions, from the last on, the groups of its codes may span.

    1              a token's channels, a row of probabilities, a pixel's channels (channels last)
    heads          [B, T, H, D]: a token's heads, where fused attention reads or made them. Its tokens are what a mask parts
    maps           [N, C, H, W]: a channel of a sample, where a convolution reads or made it

Without the last two a head of 32 and a map's line of 28 would have scales of their own, and 4.6 and 5.5 % more bytes. Heads
of one token share groups in what linears save of it anyway. A map's lines are one signal: a convolution and a norm weigh them
alike. Both are told from operators, not from sizes: for a pair representation [B, T, T, C], transposed, rows are C.
"""

from __future__ import annotations

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.fx.graph import is_tensor, memory_order, storage_root
from fp8compile.fx.ops import is_attention, is_pointwise, opname
from fp8compile.fx.partition import SavedTensor

HEADS_IN_TOKENS = (0, 2, 1, 3)  # memory [B, T, H, D] of attention's [B, H, T, D]


def row_dims_of(edge: SavedTensor) -> int:
    """How many trailing dimensions of a saved value's memory are a row (``numerics/groups.py``)."""
    value = edge.forward.meta["val"]
    order = memory_order(value)
    if order == HEADS_IN_TOKENS and _are_known(value.shape[1], value.shape[3]) and _is_of_attention(edge):
        return 2
    if order is None and value.dim() > 3 and _are_known(*value.shape[2:]) and _is_of_convolution(edge.forward):
        return int(value.dim() - 2)
    return 1


def _are_known(*sizes: object) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _is_of_attention(edge: SavedTensor) -> bool:
    root = storage_root(edge.forward)
    made = root.target is private.getitem and is_attention(root.all_input_nodes[0])
    whole = root.meta["val"].shape == edge.forward.meta["val"].shape
    return (made and whole) or any(is_attention(user) for user in edge.backward.users)


def _is_of_convolution(made: Node) -> bool:
    """Whether a convolution made a value or reads it, but for pointwise operations in its shape."""
    return _leads_to_convolution(made, forward=True) or _leads_to_convolution(made, forward=False)


def _leads_to_convolution(start: Node, forward: bool) -> bool:
    shape = start.meta["val"].shape
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if _is_convolution(node) and not forward:
            return True
        if forward and any(_is_convolution(user) and user.args[0] is node for user in node.users):
            return True
        near = (
            [n for n in node.users if is_pointwise(n)]
            if forward
            else node.all_input_nodes
            if is_pointwise(node)
            else []
        )
        new = [n for n in near if n not in seen and is_tensor(n) and n.meta["val"].shape == shape]
        seen.update(new)
        waiting += new
    return False


def _is_convolution(node: Node) -> bool:
    return node.op == "call_function" and opname(node) == "convolution"
