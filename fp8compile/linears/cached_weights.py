"""Codes of weights that come into a joint graph with its inputs (``linears.cache_weights``): no kernel of it makes them.

For each weight there may be three extra inputs (fp8compile/linears/weight_slot.py): its codes ``[N, K]``, the same codes
transposed and stored row by row ``[K, N]``, and their inv_scale ``[1, 1]``. A matmul takes the layout that it needs. The
codes are those that the graph would make with dynamic scaling: of the weight in the matmul's dtype, under its own amax.

For weights that linears of one input take (``linears.merge_dgrads``) there are two more: their transposed codes side by side,
``[K, N1 + N2 + ...]``, each under its own scale, and the largest of these scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.aot import plain_position
from fp8compile.fx.graph import insertion_point_after, splice
from fp8compile.fx.ops import CASTS
from fp8compile.fx.provenance import Origin, TensorInfo
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import CachedWeight

CODES, TRANSPOSED, INV_SCALE = range(3)  # the order of a weight's inputs


@dataclass
class _WeightInputs:
    """A weight's extra inputs, the value that they are codes of, once a matmul has taken it, and the layouts taken."""

    position: int
    inputs: tuple[Node, ...]
    value: Node | None = None
    module: str = ""
    taken: frozenset[int] = frozenset()
    packs: frozenset[int] = frozenset()  # those that were taken, by their place in Context.packed_inputs


class CachedWeights:
    """The weights of one joint graph whose codes come in with its inputs."""

    def __init__(self, graph: Graph, ctx: Context) -> None:
        at = {plain_position(node): node for node in graph.find_nodes(op="placeholder")}
        self.graph, self._weights = graph, dict[Node, _WeightInputs]()
        for position, first in ctx.weight_inputs:
            if position in at and first in at:  # AOTAutograd hands over a weight that is given twice once
                self._weights[at[position]] = _WeightInputs(position, tuple(at[first + i] for i in range(3)))
        self._packs = {
            positions: (i, at[p], at[p + 1]) for i, (positions, p) in enumerate(ctx.packed_inputs) if p in at
        }

    def _of(self, base: Node, width: int | None) -> _WeightInputs | None:
        """The weight whose codes stand for ``base`` as a matrix of this width: itself, or as it was cast."""
        weight = base.args[0] if base.target in CASTS else base
        found = self._weights.get(weight) if isinstance(weight, Node) else None
        if found is None or width not in (None, base.meta["val"].shape[1]) or base.meta["val"].dim() != 2:
            return None
        same = found.value is None or found.value.meta["val"].dtype == base.meta["val"].dtype
        return found if same else None

    def has(self, base: Node, width: int | None) -> bool:
        """Whether the codes of ``base`` come in with the inputs."""
        return self._of(base, width) is not None

    def position_of(self, base: Node, width: int | None) -> int:
        """The position among the Dynamo graph's inputs of the weight that ``base`` is."""
        weight = self._of(base, width)
        assert weight is not None
        return weight.position

    def inv_scale(self, base: Node, width: int | None) -> Node:
        """The scale of the codes of the weight that ``base`` is."""
        weight = self._of(base, width)
        assert weight is not None
        return weight.inputs[INV_SCALE]

    def are_packed(self, positions: Sequence[int]) -> bool:
        """Whether the transposed codes of just the weights at these positions come in as one matrix."""
        return tuple(positions) in self._packs

    def packed(self, weights: Sequence[tuple[Node, int | None, str]]) -> tuple[Node, Node]:
        """The transposed codes of weights (base, width, module) side by side, and the largest of their scales."""
        place, codes, largest = self._packs[tuple(self.position_of(base, width) for base, width, _ in weights)]
        for base, width, module in weights:
            self._take(base, width, module, CODES)  # what they are made of
            if (weight := self._of(base, width)) is not None:
                weight.packs |= {place}
        return codes, largest

    def codes(self, base: Node, width: int | None, module: str) -> tuple[Node, Node] | None:
        """The codes of ``base``, row by row, and their inv_scale."""
        return self._take(base, width, module, CODES)

    def laid_out(
        self, base: Node, width: int | None, module: str, across: bool, side: str
    ) -> tuple[Node, Node] | None:
        """The codes in the order that ``_scaled_mm`` takes on this side, of ``base`` or (``across``) of its transpose."""
        by_columns = side == "right"
        found = self._take(base, width, module, CODES if across == by_columns else TRANSPOSED)
        if found is None or not by_columns:
            return found

        def as_columns(codes: Tensor) -> Tensor:
            return codes.t()

        codes, inv_scale = found
        return splice(self.graph, as_columns, codes, before=insertion_point_after(codes)), inv_scale

    def _take(self, base: Node, width: int | None, module: str, layout: int) -> tuple[Node, Node] | None:
        weight = self._of(base, width)
        if weight is None:
            return None
        weight.value, weight.module = weight.value or base, weight.module or module
        weight.taken |= {layout}
        return weight.inputs[layout], weight.inputs[INV_SCALE]

    def entries(self) -> tuple[CachedWeight, ...]:
        """The weights whose codes the graph takes."""
        return tuple(_entry(weight) for weight in self._weights.values() if weight.value is not None)


def _entry(weight: _WeightInputs) -> CachedWeight:
    assert weight.value is not None
    where = Origin("weight", weight.module, "")
    info = dataclasses.replace(TensorInfo.of(weight.value), origin=where)
    return CachedWeight(info, weight.position, CODES in weight.taken, TRANSPOSED in weight.taken, tuple(weight.packs))
