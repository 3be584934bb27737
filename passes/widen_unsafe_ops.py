"""Numbers change: what may leave FP16's range is computed in FP32, until it fits again.

``fp8compile/islands/search.py`` decides on the islands. An island begins by policy (``fp8compile/islands/policy.py``) or by
measurement (``fp8compile/recipe/calibration.py``), and ends where the value is proven or measured to fit, in the forward and
the backward alike. A matmul in an island multiplies FP32 and is no FP8 linear. An island's values that are saved for backward
are saved as they are.

Left as they are: 32-bit, 64-bit, integer and complex values, the operands of custom and higher-order operators, what other
passes put there, and fused attention on a GPU, whose kernels take no FP32.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fp8compile.analysis.linears import ALL
from fp8compile.fx.graph import WIDENED, nbytes
from fp8compile.fx.ops import SIXTEEN_BIT
from fp8compile.fx.provenance import Origin, TensorInfo
from fp8compile.islands.keep_fp32 import unmatched
from fp8compile.islands.search import IslandNodes, decide
from fp8compile.islands.upcast import widen
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import ISLAND, RECIPE, Island, Notes, Skip

UNMATCHED = "matches nothing in this graph"
UNMEASURED = "this inference graph was not calibrated: its islands are those of 'auto'"


def widen_unsafe_ops(graph: Graph, ctx: Context) -> Notes:
    """Put the islands in; a graph that has islands already stays as it is."""
    if any(WIDENED in node.meta for node in graph.nodes):
        return Notes()
    missing = tuple(_wish(each, f"Recipe.fp32.keep {UNMATCHED}") for each in unmatched(graph, ctx))
    if missing and ctx.is_whole_model:
        raise ValueError("; ".join(f"Recipe.fp32.keep matches nothing: {entry.name}" for entry in missing))
    decision = decide(graph, ctx)
    entries = tuple(_entry(island, ctx) for island in decision.islands)
    widen(graph, {node for island in decision.islands for node in island.nodes})
    skips = tuple(Skip(TensorInfo.of(node), f"{why} ({unsafe})", ISLAND) for node, unsafe, why in decision.skipped)
    unmeasured = (_wish("calibration", f"Recipe.fp32.islands: {UNMEASURED}"),) if decision.unmeasured else ()
    return Notes(islands=entries, skips=skips + missing + unmeasured)


def _entry(island: IslandNodes, ctx: Context) -> Island:
    first = next(iter(island.seeds), island.nodes[0])
    reasons = tuple(dict.fromkeys(island.seeds.values())) or ("gradients of an island",)
    computing = island.computing
    return Island(
        TensorInfo.of(first),
        len(computing),
        sum(n.target in ALL for n in computing),
        _bytes_added(computing),
        "; ".join(reasons),
        tuple(n.name for n in computing),
    )


def _wish(name: str, reason: str) -> Skip:
    """A request of the recipe that has no effect; it is about no tensor."""
    return Skip(TensorInfo.without_tensor(name, Origin("-", "", "")), reason, RECIPE)


def _bytes_added(nodes: Iterable[Node]) -> int:
    """By how many bytes the values are larger in FP32: an upper bound, since values inside a kernel move none of them."""
    values = (v for n in nodes for v in pytree.tree_leaves(n.meta["val"]))
    return sum(nbytes(v) for v in values if isinstance(v, Tensor) and v.dtype in SIXTEEN_BIT)
