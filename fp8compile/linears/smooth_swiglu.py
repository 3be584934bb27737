"""Channels of ``silu(g) * u`` smoothed before they are encoded (``Recipe.linears.smooth_swiglu``; numerics/smoothing.py).

    forward   y  = Q(h / s) Q(W s)'
    dgrad     dh = (dy Q(W s)) / s          pointwise: part of the kernel of SwiGLU's backward
    wgrad     dW = (dy' Q(h / s)) s         pointwise: a kernel of its own that reads and writes dW

With s powers of two, this is what the graph computed before, but for the codes. s comes from h itself in every call. Its
exponents are kept for the backward: made anew from activations that were stored as codes, they could be others than the
forward's, and W's codes are under the forward's. They are integers, which nothing encodes.

The amax of h / s follows from the amaxes of channels, so h is read no more often than without.

Any h could be smoothed so; where it pays is what is left to choose. A gated product squares outliers, since gate and up
grow alike (Fishman et al. 2024, section 4). So it is done for what silu or gelu times another value makes, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile.analysis.linears import PLAIN_MATMULS, Matmul
from fp8compile.fx.graph import AMAX, insertion_point_after, is_tensor, splice
from fp8compile.fx.ops import CASTS, DGRAD, FORWARD, RESHAPES, WGRAD, readers
from fp8compile.linears.operands import Operands
from fp8compile.linears.plan import LinearPlan
from fp8compile.linears.views import beneath, is_across, later
from fp8compile.numerics.scaling import may_be_empty
from fp8compile.numerics.smoothing import channel_amax, channel_exponents, divided, multiplied, smoothed_amax
from fp8compile.recipe.recipe import Recipe

aten = torch.ops.aten

SMOOTHED = ", smoothed"
NOT_GATED = "its input is not silu or gelu times another value"
DELAYED = "with delayed scales, channels would be read once more, which these scales save"
CACHED = "codes of weights that come in cannot follow the channels of a batch"
NOT_TENSORWISE = "{} scales have a scale for each channel, or for a part of it, where channels differ"
FP16 = "FP16 has no room for other exponents"
ROWS_VARY = "rows that only a run counts"
WEIGHT_LAID_OUT = "its weight is not stored as [outputs, inputs]"
NOT_CHANNELS = "its input is reshaped across channels"
SHARED = "another linear reads its input"
READ_ELSEWHERE = "its input is read by more than the linear"
WEIGHT_READ_ELSEWHERE = "its weight is read by more than the linear"

ACTIVATIONS = ("aten.silu.default", "aten.gelu.default")  # by name: a graph that was copied has operators of its own


@dataclasses.dataclass(frozen=True)
class _Linear:
    """The matmuls of one linear, and what they read: its input ``[..., F]`` and its weight ``[N, F]``."""

    matmuls: Mapping[str, Matmul]
    value: Node
    weight: Node
    width: int | None  # of the matrix that the forward reshapes the input to
    views: tuple[Node, ...]  # of the input; then of the weight
    weight_views: tuple[Node, ...]

    @classmethod
    def of(cls, matmuls: Mapping[str, Matmul]) -> _Linear:
        left, right = matmuls[FORWARD].operands
        value, width, views, _ = beneath(left, "left", False)
        weight, _, weight_views, _ = beneath(right, "right", False)
        return cls(matmuls, value, weight, width, tuple(views), tuple(weight_views))

    @property
    def nodes(self) -> set[Node]:
        return {matmul.node for matmul in self.matmuls.values()}


class SmoothSwiglu:
    """What of a joint graph was smoothed.

    Attributes:
        notes: by matmul, what became of it, for the report: of a linear that stays, by its forward.
    """

    def __init__(self, operands: Operands, plan: LinearPlan) -> None:
        """A linear is smoothed only if its forward will be one of codes."""
        self.notes: dict[Node, str] = {}
        linears: dict[Node, dict[str, Matmul]] = defaultdict(dict)
        for each in plan.decisions:
            linears[each.matmul.forward][each.matmul.direction] = each.matmul
        recipes = {each.matmul.node: each.recipe for each in plan.applied}
        for forward, its in linears.items():
            recipe = recipes.get(forward)
            if recipe is None or not recipe.linears.smooth_swiglu:
                continue
            linear = _Linear.of(its)
            reason = _not_for(recipe) or _why_not(linear, {*linears})
            self.notes |= {forward: f", not smoothed: {reason}"} if reason else dict.fromkeys(linear.nodes, SMOOTHED)
            if not reason:
                _smooth(operands, linear)


def may_smooth(recipe: Recipe) -> bool:
    """Whether channels may be smoothed in any module."""
    each = (recipe, *recipe.modules.values())
    return any(r.linears.smooth_swiglu and r.linears.mode != "off" and _not_for(r) is None for r in each)


def _not_for(recipe: Recipe) -> str | None:
    """Why a recipe's linears are never smoothed."""
    if recipe.scaling_mode != "tensorwise":
        return NOT_TENSORWISE.format(recipe.linears.mode)
    if recipe.linears.scaling == "delayed":
        return DELAYED
    return CACHED if recipe.linears.cache_weights else None


def _why_not(linear: _Linear, forwards: set[Node]) -> str | None:
    value, forward = linear.value, linear.matmuls[FORWARD]
    if not is_gated(value):
        return NOT_GATED
    if value.meta["val"].dtype == torch.float16:
        return FP16
    if may_be_empty(forward.M):
        return ROWS_VARY
    if linear.views or value.meta["val"].shape[-1] != forward.K:
        return NOT_CHANNELS
    if not _stored_by_outputs(linear):
        return WEIGHT_LAID_OUT
    if others := {*readers(value)} - linear.nodes:
        return SHARED if others & forwards else READ_ELSEWHERE
    return WEIGHT_READ_ELSEWHERE if {*readers(linear.weight)} - linear.nodes else None


def _stored_by_outputs(linear: _Linear) -> bool:
    """Whether the weight is a matrix ``[N, F]`` that all take whole, the forward transposed, and the gradients stand left."""
    forward, dgrad = linear.matmuls[FORWARD], linear.matmuls.get(DGRAD)
    is_it = tuple(linear.weight.meta["val"].shape) == (forward.N, forward.K) and is_across([*linear.weight_views])
    if dgrad is not None:
        base, _, views, _ = beneath(dgrad.operands[1], "right", False)
        is_it = is_it and base is linear.weight and not is_across(views)
    return is_it and all(m.gradients in ((False, False), (True, False)) for m in linear.matmuls.values())


def is_gated(value: Node) -> bool:
    """Whether a value is the product of two of its size, of which one comes from silu or gelu."""
    product = _uncast(value)
    if product.target is not aten.mul.Tensor or not all(map(is_tensor, product.args)):
        return False
    factors = product.all_input_nodes
    alike = all(each.meta["val"].shape == product.meta["val"].shape for each in factors)
    return alike and len(factors) == 2 and any(_activation(_uncast(each)) for each in factors)


def _activation(node: Node) -> bool:
    """Whether a value is silu's or gelu's result, or a step of its decomposition."""
    return str(node.target) in ACTIVATIONS or str(node.meta.get("original_aten")) in ACTIVATIONS


def _uncast(node: Node) -> Node:
    while (node.target in CASTS or node.target in RESHAPES) and not _activation(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _smooth(operands: Operands, linear: _Linear) -> None:
    graph, matmuls = operands.graph, linear.matmuls
    exponents = _smooth_input(graph, linear.value)
    weight = _applied(graph, multiplied, linear.weight, exponents)
    for direction in {FORWARD, DGRAD} & matmuls.keys():
        node = matmuls[direction].node
        _, _, views, _ = beneath(matmuls[direction].operands[1], "right", False)
        node.update_arg(PLAIN_MATMULS[node.target] + 1, operands.with_views(weight, views))
    for direction, undo in ((DGRAD, divided), (WGRAD, multiplied)):
        if direction in matmuls:
            _after(graph, undo, matmuls[direction].node, exponents)


def _smooth_input(graph: Graph, value: Node) -> Node:
    """Let all who read ``value`` read ``value / s``; returns the exponents of s."""
    users = list(value.users)

    def statistics(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        amax = channel_amax(h)
        exponents = channel_exponents(amax)
        return exponents, smoothed_amax(amax, exponents), divided(h, exponents)

    exponents, amax, smooth = splice(graph, statistics, value, before=insertion_point_after(value))
    exponents.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    smooth.meta[AMAX] = amax
    for user in users:
        user.replace_input_with(value, smooth)
    return exponents  # type: ignore[no-any-return]


def _after(graph: Graph, fn: Callable[[Tensor, Tensor], Tensor], value: Node, exponents: Node) -> None:
    """Let all who read ``value`` read ``fn(value, exponents)``."""
    users = list(value.users)
    new = _applied(graph, fn, value, exponents)
    for user in users:
        user.replace_input_with(value, new)


def _applied(graph: Graph, fn: Callable[[Tensor, Tensor], Tensor], value: Node, exponents: Node) -> Node:
    node: Node = splice(graph, fn, value, exponents, before=insertion_point_after(later(value, exponents)))
    return node
