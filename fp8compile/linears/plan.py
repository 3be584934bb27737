"""What becomes of each matmul of a linear, decided once: passes act on it, and the report tells of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from fp8compile.analysis.linears import GROUPED, Matmul, linear_matmuls
from fp8compile.fx.ops import WGRAD
from fp8compile.fx.provenance import module_path
from fp8compile.linears.integer_matmuls import INT8_MODE
from fp8compile.linears.known_scales import GRADIENT, INPUT, WEIGHT
from fp8compile.linears.operands import How
from fp8compile.linears.paying import Paying
from fp8compile.linears.reasons import LinearReasons
from fp8compile.linears.views import beneath
from fp8compile.numerics import E4M3, E5M2, INT8
from fp8compile.recipe.context import Context
from fp8compile.recipe.linear_formats import gradient_format
from fp8compile.recipe.recipe import Recipe

Widths = dict[Node, int | None]  # by value, of the matrix that a matmul takes of it


@dataclass(frozen=True)
class Apply:
    """A matmul that will be one of codes: the recipe of its module, how its two operands are encoded, and predicted times.

    Attributes:
        us: microseconds in FP8 and in 16 bit; zeros where nothing was asked.
    """

    matmul: Matmul
    recipe: Recipe
    specs: tuple[How, How]
    us: tuple[float, float]

    @property
    def alike(self) -> tuple[object, ...]:
        """What is equal for two matmuls that can be one."""
        result = self.matmul.K, self.matmul.node.meta["val"].dtype
        specs = (dataclasses.replace(spec, role="", module="") for spec in self.specs)
        return self.recipe.linears.emulate, self.recipe.linears.merge_dgrads, *result, *specs


@dataclass(frozen=True)
class ApplyGrouped:
    """A grouped matmul of experts that will be one of codes (linears/expert_matmuls.py)."""

    matmul: Matmul
    recipe: Recipe


@dataclass(frozen=True)
class Leave:
    """A matmul that stays as it is."""

    matmul: Matmul
    reason: str


@dataclass(frozen=True)
class LinearPlan:
    """The decision for each matmul of a joint graph's linears, in the graph's order."""

    decisions: tuple[Apply | ApplyGrouped | Leave, ...]

    @property
    def applied(self) -> tuple[Apply, ...]:
        return tuple(each for each in self.decisions if isinstance(each, Apply))


def plan_linears(graph: Graph, ctx: Context, *, delayed: bool) -> LinearPlan:
    """Decide for each matmul; ``delayed``: whether scales come in with the inputs."""
    parameters = ctx.parameters_of(graph)
    matmuls = linear_matmuls(graph, parameters)
    recipes = {matmul.forward: ctx.recipe_at(module_path(matmul.forward)) for matmul in matmuls}
    reasons = LinearReasons(graph, ctx, parameters)
    paying = Paying(matmuls, lambda matmul: recipes[matmul.forward])

    def decided(matmul: Matmul) -> Apply | ApplyGrouped | Leave:
        recipe = recipes[matmul.forward]
        reason = reasons.reason_to_leave(matmul, recipe) or paying.reason_to_leave(matmul)
        if reason:
            return Leave(matmul, reason)
        if matmul.node.target in GROUPED:
            return ApplyGrouped(matmul, recipe)
        return Apply(matmul, recipe, _specs(matmul, recipe, delayed=delayed), paying.figures(matmul))

    return LinearPlan(tuple(map(decided, matmuls)))


def tensorwise_operands(applied: Sequence[Apply]) -> tuple[Widths, Widths]:
    """The gradients, and the inputs under known scales, each with the width of its matrix."""
    found: dict[str, Widths] = {GRADIENT: {}, INPUT: {}, WEIGHT: {}}
    for each in applied:
        for operand, side, spec in zip(each.matmul.operands, ("left", "right"), each.specs, strict=True):
            if not spec.rowwise and (spec.delayed or spec.role == GRADIENT):
                value, width, *_ = beneath(operand, side, spec.rowwise)
                found[spec.role][value] = width
    return found[GRADIENT], found[INPUT]


def _specs(matmul: Matmul, recipe: Recipe, *, delayed: bool) -> tuple[How, How]:
    """How the two operands of a matmul are encoded."""
    gradient = E5M2 if gradient_format(recipe.linears.formats, matmul.direction) == E5M2.name else E4M3
    known = recipe.linears.scaling == "delayed" and delayed
    second = INPUT if matmul.direction == WGRAD else WEIGHT
    roles = [
        GRADIENT if is_gradient else each for is_gradient, each in zip(matmul.gradients, (INPUT, second), strict=True)
    ]
    rowwise, where = recipe.scaling_mode == "rowwise", module_path(matmul.forward)
    cached, of_gradient = recipe.linears.cache_weights and not rowwise, {GRADIENT: gradient}
    left, right = (
        How(
            INT8 if recipe.linears.mode == INT8_MODE else of_gradient.get(role, E4M3),
            *(rowwise, known, cached and role != GRADIENT, role, where),
        )
        for role in roles
    )
    return left, right
