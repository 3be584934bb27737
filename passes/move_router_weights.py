"""Numbers change, by the rounding of one operand. A router's gradient is taken before the last matmul of experts.

    z = u * (a W)       rows s of tokens, u [S, 1] the router's weights, W of the expert that each row is sent to
    du = sum_n dz * y   with y = a W, saved for it alone
    du = sum_k P * a    with P = dz W', of which da = u * P, and a, which the wgrad has: fp8compile/numerics/router_weights.py

So y is not saved, neither whole nor as codes: k tokens' worth of the hidden size for each token with k experts. The dgrad is
one matmul as before. It reads dz, where it read u * dz, and the rows are weighed behind it: a factor of a row goes through a
product with a matrix. dz is rounded to the matmul's dtype as u * dz was, so the error of ``da`` is what it was, in size.
``du`` has the error of P, one rounding of its elements, where it had y's and that of y's codes. A kernel that reads P and
``a`` for the activation's backward sums du too; dz is written once more, since the wgrad still reads u * dz.

Rows behind the last group are what the grouped matmul leaves there, in P as in y.

The report counts y among what the cut does not save.

Left as they are: results that the forward or the backward reads for something else too, a mask for example; matmuls without a
wgrad, whose ``a`` may not be kept; checkpointed regions, which save no y.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.analysis.linears import GROUPED
from fp8compile.fx.aot import computed_from_gradients
from fp8compile.fx.checkpointed import region_of
from fp8compile.fx.graph import insertion_point_after, splice
from fp8compile.fx.ops import CASTS
from fp8compile.numerics.router_weights import products_of_rows, weighed_rows
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


@dataclass(frozen=True)
class Weighed:
    """The nodes of one ``u * (a W)`` and of its backward.

    Attributes:
        inner: a [S, K].
        weights: u [S, 1].
        gradient: dz [S, N].
        weighed: u * dz, in the matmul's dtype, which dgrad and wgrad read.
        dgrad: (u * dz) W'.
        of_weights: du [S, 1].
    """

    inner: Node
    weights: Node
    gradient: Node
    weighed: Node
    dgrad: Node
    of_weights: Node


def move_router_weights(graph: Graph, ctx: Context) -> Notes:
    """Take the gradients of weights of rows from what the matmul reads, where its result would be saved for them."""
    backward = computed_from_gradients(graph) if ctx.recipe.rounds_saved else set()
    if backward:
        for node in list(graph.nodes):
            if node.target in GROUPED and node not in backward and (found := _weighed(node, backward)):
                _move(graph, found)
        graph.eliminate_dead_code()
    return Notes()


def _move(graph: Graph, at: Weighed) -> None:
    dtype, of_weights = at.dgrad.meta["val"].dtype, at.of_weights.meta["val"].dtype

    def rounded(gradient: Tensor) -> Tensor:
        return gradient.to(dtype)

    def products(x: Tensor, y: Tensor) -> Tensor:
        return products_of_rows(x, y, of_weights)

    for node in (at.dgrad.args[1], at.dgrad):  # the weight is a view of what the forward has
        assert isinstance(node, Node)
        if node > at.of_weights:
            at.of_weights.prepend(node)
    gradient = splice(graph, rounded, at.gradient, before=insertion_point_after(at.gradient))
    at.dgrad.replace_input_with(at.weighed, gradient)
    readers = list(at.dgrad.users)
    result = splice(graph, weighed_rows, at.dgrad, at.weights, before=insertion_point_after(at.dgrad))
    for reader in readers:
        reader.replace_input_with(at.dgrad, result)
    made = splice(graph, products, at.dgrad, at.inner, before=at.of_weights)
    at.of_weights.replace_all_uses_with(made)


def _weighed(product: Node, backward: Set[Node]) -> Weighed | None:
    """The backward of a grouped matmul of rows whose result is weighed; None for any other."""
    inner, weight, groups = product.args[:3]
    late = [user for user in product.users if user in backward]
    early = [user for user in product.users if user not in backward]
    if len(late) != 1 or len(early) != 1 or product.meta["val"].dim() != 2 or region_of(product) is not None:
        return None
    weights, gradient, total = _other(early[0], product), _other(late[0], product), _total(late[0])
    if weights is None or gradient is None or total is None or not _is_one_a_row(weights, product):
        return None
    scaled = [user for user in gradient.users if _other(user, gradient) is weights]
    if len(scaled) != 1 or not isinstance(inner, Node):
        return None
    read = _cast(scaled[0])
    dgrad = next((u for u in read.users if u.target in GROUPED and u.args[0] is read), None)
    if dgrad is None or dgrad.args[2] is not groups or not _is_transposed(dgrad.args[1], weight):
        return None
    return Weighed(inner, weights, gradient, read, dgrad, total) if _has_wgrad(read, inner, groups) else None


def _other(node: Node, factor: Node) -> Node | None:
    """The other factor of a product of two values."""
    if node.target is not aten.mul.Tensor or factor not in node.args:
        return None
    other = node.args[1 if node.args[0] is factor else 0]
    return other if isinstance(other, Node) and other is not factor else None


def _total(node: Node) -> Node | None:
    """The sum along rows that is all that reads a value, behind a cast."""
    node = _cast(node)
    total = next(iter(node.users)) if len(node.users) == 1 else None
    if total is None or total.target is not aten.sum.dim_IntList or len(total.args) != 3:
        return None
    return total if total.args[1] in ([1], [-1]) and total.args[2] is True else None


def _cast(node: Node) -> Node:
    """The cast of a value that is all that reads it, or the value."""
    user = next(iter(node.users)) if len(node.users) == 1 else node
    return user if user.target in CASTS else node


def _is_one_a_row(weights: Node, product: Node) -> bool:
    rows, of = product.meta["val"].shape[0], weights.meta["val"].shape
    return len(of) == 2 and of[1] == 1 and statically_known_true(of[0] == rows)


def _is_transposed(weight: object, of: object) -> bool:
    """Whether each expert's matrix is the other's transposed."""
    return isinstance(weight, Node) and weight.target is aten.permute.default and weight.args == (of, [0, 2, 1])


def _has_wgrad(read: Node, inner: Node, groups: object) -> bool:
    """Whether the gradient's only other reader is the wgrad, which reads ``inner``."""
    permuted = [user for user in read.users if user.target is aten.permute.default]
    if len(read.users) != 2 or len(permuted) != 1 or len(permuted[0].users) != 1:
        return False
    wgrad = next(iter(permuted[0].users))
    return wgrad.target in GROUPED and wgrad.args[:3] == (permuted[0], inner, groups)
