"""The views between a value and the operand that a matmul takes of it."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.ops import RESHAPES, TRANSPOSES
from fp8compile.fx.tracing import fake_result

aten = torch.ops.aten


def beneath(
    operand: Node, side: str, rowwise: bool, through_rows: bool = False
) -> tuple[Node, int | None, list[Node], int | None]:
    """The value to encode, the width of the matrix to reshape it to (None: no reshape), the transposes that lead from there
    to ``operand``, and, rowwise, the contracted dimension.

    Rowwise, ``through_rows`` looks through reshapes that leave rows whole; else no reshape is looked through.
    """
    transposes: list[Node] = []
    axis = 1 if side == "left" else 0
    while operand.target in TRANSPOSES and operand.args[0].meta["val"].dim() == 2:  # type: ignore[union-attr]
        transposes.insert(0, operand)
        axis = 1 - axis if _swaps(operand) else axis
        operand = operand.args[0]  # type: ignore[assignment]
    width, base = operand.meta["val"].shape[1], operand
    while (
        isinstance(width, int)
        and base.target in RESHAPES
        and not (rowwise and (not through_rows or _mixes_columns(base, width)))
    ):
        base = base.args[0]  # type: ignore[assignment]
    return base, None if base is operand else width, transposes, axis if rowwise else None


def _mixes_columns(reshape: Node, width: int) -> bool:
    """Whether a reshape reads what is no matrix of so many columns; such a matrix has the same rows before and after."""
    shape = reshape.args[0].meta["val"].shape  # type: ignore[union-attr]
    return not shape or shape[-1] != width


def _swaps(view: Node) -> bool:
    return view.target is not aten.permute.default or list(view.args[1]) == [1, 0]  # type: ignore[arg-type]


def is_across(transposes: list[Node]) -> bool:
    """Whether they lead to the transpose."""
    return sum(map(_swaps, transposes)) % 2 == 1


def repeated(graph: Graph, view: Node, value: Node) -> Node:
    """A copy of ``view`` with ``value`` as its operand, directly after the original."""
    at = later(view, value)
    with graph.inserting_after(at):
        new = graph.node_copy(view, lambda n: value if n is view.args[0] else n)
    fake_mode = private.detect_fake_mode([value.meta["val"]])
    assert fake_mode is not None
    with fake_mode:
        new.meta["val"] = fake_result(new)
    new.meta.pop("tensor_meta", None)
    return new


def later(a: Node, b: Node) -> Node:
    return b if a < b else a
