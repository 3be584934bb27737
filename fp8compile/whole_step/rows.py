"""A parameter's update on rows of one group each, ``[numel / G, G]``, so that Inductor makes one kernel of it.

States come into the graph as such rows. The parameter, its gradient and its codes, which forward and backward have in their
own shapes, are viewed in the graph. Numbers stay as they are (fp8compile/optim/row_views.py).
"""

from __future__ import annotations

from torch import Tensor

from fp8compile.optim.code_writer import CLIPPED, TRANSPOSED
from fp8compile.optim.plan import Tensors, UpdatePlan
from fp8compile.optim.row_views import View, as_one_piece, pieces, viewed
from fp8compile.optim.step_codes import ROWS

OF_GRAPH = (CLIPPED, TRANSPOSED, ROWS)  # beside the parameter and its gradient


def in_rows(plan: UpdatePlan, p: Tensor) -> View | None:
    """How the tensors of a parameter are viewed; None where its update has no groups, or is several pieces or planes."""
    (piece, view), *others = pieces(plan, p)
    return None if others or piece.planes > 1 or plan.group_size in (None, 1) else view


def states_in_rows(plan: UpdatePlan, p: Tensor, tensors: Tensors) -> Tensors:
    """What an update takes beside parameter and gradient, as it comes into the graph."""
    view = in_rows(plan, p)
    if view is None:
        return tensors
    ours = {name: t for name, t in tensors.items() if name not in OF_GRAPH}
    return {**tensors, **viewed(ours, view)}


def updated_in_rows(plan: UpdatePlan, tensors: Tensors) -> Tensors:
    """``plan(tensors)`` of states that are rows already; parameter and codes in their own shape."""
    p = tensors["param"]
    view = in_rows(plan, p)
    if view is None:
        return as_one_piece(plan, p)(tensors)
    new = plan({**tensors, **viewed({"param": p, "grad": tensors["grad"]}, view)})
    return {name: t.view(p.shape) if name in ("param", ROWS) else t for name, t in new.items()}
