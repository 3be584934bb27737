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

from torch.fx import Graph

from fp8compile import _torch as private
from fp8compile.analysis.residuals import is_stored_as_codes, residuals_of, stored_residuals
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes


def store_residuals(graph: Graph, ctx: Context) -> Notes:
    """Let Inductor store values computed from several tensors and read both before a matmul and after it."""
    if ctx.recipe.rewrites_graph:
        for node in stored_residuals(residuals_of(graph), is_stored_as_codes):
            node.meta[private.STORED] = True
    return Notes()
