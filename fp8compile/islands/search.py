"""Where a graph computes in FP32: which nodes, and why.

    seeds   what policy or calibration calls unsafe, and what the user wants in FP32
    grow    a reader of a value that does not fit FP16 joins, until it fits again: proven (fp8compile/analysis/ranges),
            or measured (fp8compile/recipe/calibration.py); by policy an island ends before linears too
    mirror  the gradient of what is FP32 is FP32: the backward of an operation in an island belongs to it (same autograd
            node, so same seq_nr), and so do sums of such gradients. Calibration has measured gradients and needs no mirror
    prune   an island that passes no FP32 value from one node to another changes nothing: a kernel computes in FP32 anyway.
            Its gradients are dropped with it, and stay with an island that is kept

``fp32.islands``: "policy" does not prove anything and widens BF16 too, as AMP does; "auto" begins only where a value is
not proven to fit, and only in FP16, since BF16 has FP32's range.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.dataflow import Source, sources
from fp8compile.analysis.ranges import Interval, ranges
from fp8compile.fx.graph import SPLICED, is_tensor, storage_root
from fp8compile.fx.ops import CASTS, is_view, opname, readers
from fp8compile.fx.provenance import module_path
from fp8compile.islands.keep_fp32 import kept_fp32
from fp8compile.islands.measured import Measured, measured
from fp8compile.islands.policy import ends_island, is_pole, overflow_reason, prescale_factors
from fp8compile.islands.upcast import can_widen, is_no_op, is_sixteen_bit, takes_no_fp32
from fp8compile.numerics.formats import FP16_NORMAL
from fp8compile.recipe.calibration import Calibration
from fp8compile.recipe.context import Context

aten = torch.ops.aten


NO_FP32 = (
    "this kernel of fused attention takes no FP32; choose another around the call: "
    "torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)"
)


@dataclass
class IslandNodes:
    """Connected nodes to widen: ``seeds`` with the reason of each; ``requested`` where the user wants them in FP32."""

    nodes: list[Node]
    seeds: dict[Node, str] = field(default_factory=dict)
    requested: bool = False

    @property
    def computing(self) -> list[Node]:
        """The nodes that compute: no views, casts or multiplications by one."""
        return [n for n in self.nodes if computes(n)]


@dataclass
class Decision:
    """The islands of a graph, and the nodes left although policy calls them unsafe, each with the reasons for and against."""

    islands: list[IslandNodes] = field(default_factory=list)
    skipped: list[tuple[Node, str, str]] = field(default_factory=list)
    unmeasured: bool = False  # an inference graph that calibration has not seen, so that "auto" has decided


def computes(node: Node) -> bool:
    """Whether a node computes: it is no input, view, copy, cast, multiplication by one or part of a tuple."""
    copies = (*CASTS, private.getitem, aten.clone.default)
    return node.op == "call_function" and not (is_view(node) or node.target in copies or is_no_op(node))


def decide(graph: Graph, ctx: Context) -> Decision:
    """The islands of a joint or inference graph under the recipe."""
    found = _Search(graph, ctx)
    decision = found.decision() if found.seeds else Decision(skipped=found.skipped)
    decision.unmeasured = found.measured is None and not isinstance(ctx.recipe.fp32.islands, str)
    return decision


class _Search:
    def __init__(self, graph: Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self.sources = sources(graph, ctx.parameters_of(graph))
        self.prescaled = prescale_factors(self.sources)
        self.measured = _measured(graph, ctx)
        self._ranges: Mapping[Node, Interval] | None = None
        self.skipped: list[tuple[Node, str, str]] = []
        self.requested: set[Node] = set()
        self.fp32_readers: dict[Node, None] = {}  # FP32 already, made from an island's values
        self.seeds: dict[Node, str] = {}
        for node in graph.nodes:
            if is_view(node) or not (can_widen(node) or takes_no_fp32(node)):
                continue
            reason = self._why_begin(node)
            if reason and can_widen(node):
                self.seeds[node] = reason
            elif reason:
                self.skipped.append((node, reason, NO_FP32))

    # -------------------------------------------------------------------------------------------------- begin

    def _why_begin(self, node: Node) -> str | None:
        recipe = self.ctx.recipe_at(module_path(node))
        if pattern := kept_fp32(node, self.ctx):
            self.requested.add(node)
            return f"Recipe.fp32.keep: {pattern}"
        if self.measured is not None and isinstance(recipe.fp32.islands, Calibration):
            return self.measured.overflow_reason(node)
        if recipe.fp32.islands == "off" or Source.GRADIENT in self.sources[node]:
            return None
        if recipe.fp32.islands == "policy":
            return overflow_reason(node, self.sources, self.prescaled)
        return self._unproven(node) if _is_fp16(node) else None

    def _unproven(self, node: Node) -> str | None:
        reason = overflow_reason(node, self.sources, self.prescaled)
        if reason and self.ranges[node].fits():
            self.skipped.append((node, reason, f"proven to fit: {self.ranges[node]}"))
            reason = None
        pole = next((u for u in readers(node) if is_pole(u, node)), None)
        if reason is None and pole is not None and computes_or_casts(node) and not self._is_off_zero(node):
            return f"read by {opname(pole)}, which has a pole where this flushes to zero"
        return reason

    @property
    def ranges(self) -> Mapping[Node, Interval]:
        if self._ranges is None:
            self._ranges = ranges(self.graph)
        return self._ranges

    # --------------------------------------------------------------------------------------------------- grow

    def decision(self) -> Decision:
        inside = self._grown(dict.fromkeys(self.seeds))
        if self.measured is None:
            inside = self._mirrored(inside)
        found = self._connected(inside)
        kept = [i for i in found if (i.requested and i.computing) or self._has_effect(i, inside)]
        whole = {n.meta.get("seq_nr") for i in kept for n in i.nodes} - {None}
        islands = [i for i in found if i in kept or self._is_backward_of(i, whole, inside)]
        return Decision(islands, self.skipped)

    def _grown(self, inside: dict[Node, None]) -> dict[Node, None]:
        waiting = list(inside)
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user not in inside and user not in self.fp32_readers and self._must_follow(user, node):
                    (inside if can_widen(user) else self.fp32_readers)[user] = None
                    waiting.append(user)
            parent = node.args[0] if node.target is private.getitem else None
            if isinstance(parent, Node) and parent not in inside and node in inside:
                inside[parent] = None
        return inside

    def _must_follow(self, user: Node, node: Node) -> bool:
        """Whether ``user`` must not read ``node`` cast to 16 bit; if it is FP32 already, whether it passes the value on."""
        if node.target is not private.getitem and not is_tensor(node):
            return True  # the parts of a tuple
        if not node.meta["val"].is_floating_point():
            return False  # a mask has no range to lose
        if not can_widen(user):
            return _takes_fp32(user) and not self._fits(node)
        if is_view(user):
            return not self._fits(node) or any(is_pole(u, user) for u in readers(user))
        if self.measured is not None:
            return not self._fits(node)
        if Source.GRADIENT in self.sources[user] or ends_island(user, self.sources):
            return False
        if user.target in CASTS and self._fits(user):
            return False
        return not self._fits(node) or (is_pole(user, node) and not self._is_off_zero(node))

    def _fits(self, node: Node) -> bool:
        if self.measured is not None:
            return self.measured.fits(node)
        return self._proves(node) and self.ranges[node].fits()

    def _is_off_zero(self, node: Node) -> bool:
        if not self._proves(node):
            return False
        proven = self.ranges[node]
        return bool(proven.lower >= FP16_NORMAL) or bool(proven.upper <= -FP16_NORMAL)

    def _proves(self, node: Node) -> bool:
        return (
            self.ctx.recipe_at(module_path(node)).fp32.islands != "policy" and is_tensor(node) and node in self.ranges
        )

    # ------------------------------------------------------------------------------------------------- mirror

    def _mirrored(self, inside: dict[Node, None]) -> dict[Node, None]:
        """``inside`` with the backward of each of its operations, the gradients of its FP32 values, and sums of these."""
        whole = {n.meta.get("seq_nr") for n in inside} - {None}
        reading = {n.meta.get("seq_nr") for n in self.fp32_readers} - {None}
        result = dict(inside)
        for node in self.graph.nodes:
            if node in result or Source.GRADIENT not in self.sources[node] or not can_widen(node):
                continue
            number = node.meta.get("seq_nr")
            if _is_sum_of_gradients(node):
                belongs = all(n in result for n in node.all_input_nodes)
            elif is_view(node):
                belongs = node.args[0] in result
            else:
                belongs = number in whole or (number in reading and node.target in CASTS)
            if belongs:
                result[node] = None
        return result

    # -------------------------------------------------------------------------------------------------- islands

    def _connected(self, inside: Mapping[Node, None]) -> list[IslandNodes]:
        """``inside`` in connected parts, in graph order."""
        part: dict[Node, Node] = {}

        def root(node: Node) -> Node:
            while part.setdefault(node, node) is not node:
                node = part[node]
            return node

        for node in (*inside, *self.fp32_readers):
            for parent in node.all_input_nodes:
                if parent in inside or parent in self.fp32_readers:
                    part[root(node)] = root(parent)
        found: dict[Node, IslandNodes] = {}
        for node in self.graph.nodes:
            if node in inside:
                island = found.setdefault(root(node), IslandNodes([]))
                island.nodes.append(node)
                island.requested |= node in self.requested
                if node in self.seeds:
                    island.seeds[node] = self.seeds[node]
        return list(found.values())

    def _has_effect(self, island: IslandNodes, inside: Mapping[Node, None]) -> bool:
        """Whether any FP32 value goes from one node of the island to another, or to one that takes FP32 anyway.

        Without calibration that must happen in the forward: a value that only its own backward reads would be kept in
        FP32 for nothing, since what the forward handed on was rounded.
        """
        counted = [n for n in island.nodes if self.measured is not None or Source.GRADIENT not in self.sources[n]]
        makers = [n for n in counted if not is_view(n) and n.target is not private.getitem]
        reading = (u for n in makers for u in readers(n))
        forward = (u for u in reading if self.measured is not None or Source.GRADIENT not in self.sources[u])
        return any(u in inside or (_takes_fp32(u) and u in self.fp32_readers) for u in forward)

    def _is_backward_of(self, island: IslandNodes, whole: Set[object], inside: Mapping[Node, None]) -> bool:
        """Whether an island of gradients alone belongs to one that has an effect, and passes on an FP32 value itself.

        The two are not connected where the backward reads nothing of its forward, such as the backward of a factor.
        """
        if self.measured is not None or not any(n.meta.get("seq_nr") in whole for n in island.nodes):
            return False
        makers = (n for n in island.nodes if computes(n))
        return any(u in inside for n in makers for u in readers(n))


def computes_or_casts(node: Node) -> bool:
    return computes(node) or node.target in CASTS


def _measured(graph: Graph, ctx: Context) -> Measured | None:
    """What calibration knows of this graph's nodes; None without a calibration."""
    islands = ctx.recipe.fp32.islands
    return measured(islands, graph) if isinstance(islands, Calibration) else None


def _is_fp16(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype == torch.float16


def _takes_fp32(user: Node) -> bool:
    """Whether a reader computes in FP32 already, or compares."""
    return user.op == "call_function" and not is_sixteen_bit(user) and SPLICED not in user.meta


def _is_sum_of_gradients(node: Node) -> bool:
    """Whether a node adds up the gradients of one value's several uses: such a sum belongs to no autograd node."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return False
    own = node.meta.get("seq_nr")
    return all(storage_root(n).meta.get("seq_nr") != own for n in node.all_input_nodes)
