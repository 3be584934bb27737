"""Why a linear, or one of its matmuls, is left as it is: the recipe, the user, its shape, the device. Changes nothing."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Graph, Node

from fp8compile.analysis.dataflow import sources, user_fp32
from fp8compile.analysis.linears import (
    GROUPED,
    PLAIN_MATMULS,
    Matmul,
    is_last,
    is_tied_to_embedding,
    made_from,
)
from fp8compile.fx.aot import plain_position
from fp8compile.fx.graph import WIDENED, dtype_text, size_hint
from fp8compile.fx.ops import FORWARD
from fp8compile.fx.provenance import module_path
from fp8compile.linears.block_operands import reason_against_blocks
from fp8compile.linears.device import (
    fp8_unsupported_reason,
    grouped_unsupported_reason,
    int8_unsupported_reason,
)
from fp8compile.linears.expert_reasons import ROUTER, reason_against_experts, routers
from fp8compile.linears.integer_matmuls import INT8_MODE, reason_against_integers
from fp8compile.numerics import ENCODABLE
from fp8compile.numerics.formats import FP8_MULTIPLE
from fp8compile.numerics.scaling import may_be_empty
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe

# A last linear with so many times more outputs than inputs tells tokens or classes apart. An MLP's has 4 times as many, but
# is followed by another linear.
VOCABULARY = 4
UPCAST, ISLAND = "upcast by the user", "in an FP32 island"


class LinearReasons:
    """Of the linears of one joint graph; the three matmuls of a linear share its verdict."""

    def __init__(self, graph: Graph, ctx: Context, parameters: Set[Node]) -> None:
        self.graph, self.ctx, self.parameters = graph, ctx, parameters
        self.upcast = user_fp32(graph, parameters)
        self.heads = made_from({p for p in parameters if plain_position(p) in ctx.place.heads})
        self.routers = routers(graph)
        self._verdicts: dict[Node, str | None] = {}

    def reason_to_leave(self, matmul: Matmul, recipe: Recipe) -> str | None:
        """None where nothing is against it."""
        forward = matmul.forward
        if WIDENED in matmul.node.meta:
            return ISLAND
        if forward not in self._verdicts:
            self._verdicts[forward] = (
                self.ctx.skip_reason(module_path(forward), "linears.mode", ("linears.skip", "skip"))
                or (matmul.weight in self.heads and "output head: fp8compile.mark_head")
                or (is_tied_to_embedding(matmul.weight) and "output head: its weight is tied to an embedding")
                or _not_a_plain_matmul(matmul, forward, recipe)
                or (forward in self.routers and ROUTER)
                or (forward in self.upcast and UPCAST)
                or _no_shape(matmul, recipe)
                or self._why_last(matmul)
                or _unsupported(forward, recipe)
                or None
            )
        return (
            self._verdicts[forward]
            or _not_a_plain_matmul(matmul, matmul.node, recipe)
            or reason_against_integers(matmul, recipe)
        )

    def _why_last(self, matmul: Matmul) -> str | None:
        """Why a linear is an output head although nothing names it so."""
        many = matmul.N >= VOCABULARY * matmul.K
        if many and self.ctx.is_whole_model and is_last(matmul, sources(self.graph, self.parameters)):
            return f"output head: the last linear, N={matmul.N} from K={matmul.K}"
        return None


def _not_a_plain_matmul(matmul: Matmul, node: Node, recipe: Recipe) -> str | None:
    if node.target in GROUPED:
        return reason_against_experts(node, matmul.direction if node is matmul.node else FORWARD, recipe)
    if node.target not in PLAIN_MATMULS:
        return "a batched matmul of parameters (experts) is left in its dtype"
    if node.kwargs:
        return "addmm with alpha or beta"
    value = node.meta["val"]
    return None if value.dtype in ENCODABLE else f"{dtype_text(value)} is left alone"


def _unsupported(forward: Node, recipe: Recipe) -> str | None:
    if recipe.linears.emulate:
        return None
    device = forward.meta["val"].device
    if forward.target in GROUPED:
        return fp8_unsupported_reason(device) or grouped_unsupported_reason(device)
    return int8_unsupported_reason(device) if recipe.linears.mode == INT8_MODE else fp8_unsupported_reason(device)


def _no_shape(matmul: Matmul, recipe: Recipe) -> str | None:
    for name in () if recipe.linears.mode == INT8_MODE else ("K", "N"):
        if (size := getattr(matmul, name)) % FP8_MULTIPLE:
            return f"{name}={size} is not a multiple of {FP8_MULTIPLE}"
    if size_hint(matmul.M) == 0:
        return "no rows"
    if (why := reason_against_blocks(matmul, recipe)) or recipe.linears.mode == INT8_MODE:
        return why
    if not recipe.linears.emulate and may_be_empty(matmul.M):
        return "rows that only a run counts: _scaled_mm takes no matmul without rows"
    bf16 = matmul.forward.meta["val"].dtype == torch.bfloat16
    if recipe.linears.mode == "rowwise" and not recipe.linears.emulate and not bf16:
        return "_scaled_mm with rowwise scales gives BF16 only"
    return None
