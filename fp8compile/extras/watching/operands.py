"""What delayed scaling did in a step: how much of its operands was clipped, and how near the nearest one was to that.

    fp8_headroom   the least over all operands of log2(largest FP8 value * inv_scale / amax); below 0 where one was clipped
    clipped        elements that saturation cost more than rounding would have
    fell_back      operands of which too much was clipped, so that the next step measures them

``inv_scale`` is the one that the operand had when the step began, ``amax`` that of the last backward in it. An operand that
was all zeros in it has no headroom to tell. A step that
measures its scales, behind one that fell back, has no headroom to tell. Under dynamic scaling nothing is clipped, and there
is nothing to report.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.extras.watching.late import Late
from fp8compile.linears.history import MAX, Histories, alive
from fp8compile.linears.state import labels_of

AMAX, INV_SCALE, CLIPPED, LOST, FELL_BACK, MEASURES = range(6)  # columns of what goes to the host, float32 [V, 6]


class GraphOperands:
    """The histories of one graph, the names of its operands, and what the host knows of them."""

    def __init__(self, histories: Histories, model: nn.Module) -> None:
        self.histories = weakref.ref(histories)
        self.labels = labels_of(model, histories)
        self.largest = torch.tensor([MAX[o.format] for o in histories.operands])
        self.inv_scales, self.entries = histories.inv_scales, histories.entries  # as the step begins
        self.totals, self.measures = Late(histories.totals), Late(histories.fell_back)  # before the step


@dataclass(frozen=True)
class PendingOperands:
    """What one graph's operands did in a step, on its way to the host."""

    graph: GraphOperands
    seen: Late


class OperandCollector:
    """Collects, step by step, what the histories of a model saw."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: tuple[int, ...] = ()
        self._graphs: list[GraphOperands] = []

    def collect(self) -> list[PendingOperands]:
        """What was added since the last call. No host sync."""
        parts = []
        for graph in self._graphs:
            each = graph.histories()
            if each is not None and each.entries != graph.entries:
                scales = each.inv_scales if graph.entries == 0 else graph.inv_scales  # the first step measured them
                columns = [each.entry, scales, *each.totals.unbind(1), each.fell_back.float()]
                parts.append(PendingOperands(graph, Late(torch.stack(columns, 1))))
                graph.inv_scales, graph.entries = each.inv_scales, each.entries
        self._refresh()
        return parts

    def _refresh(self) -> None:
        """Look the graphs up again where some came or went."""
        known, model = tuple(map(id, alive())), self._model()
        before = {id(each): graph for graph in self._graphs if (each := graph.histories()) is not None}
        if (known != self._known or len(before) < len(self._graphs)) and model is not None:
            self._known = known
            mine = [each for each in alive() if each.is_of(model) and each.operands]
            self._graphs = [before.get(id(each)) or GraphOperands(each, model) for each in mine]

    @staticmethod
    def read(parts: Iterable[PendingOperands]) -> dict[str, Any]:
        """``fp8_headroom``, ``nearest_fp8``, ``clipped`` and ``fell_back``; waits for parts that are under way."""
        found: dict[str, Any] = {}
        least = math.inf
        for part in parts:
            seen, graph = part.seen.value(), part.graph
            new, measured = seen[:, CLIPPED:MEASURES] - graph.totals.value(), bool(graph.measures.value().any())
            graph.totals, graph.measures = Late(seen[:, CLIPPED:MEASURES]), Late(seen[:, MEASURES])
            found["clipped"] = found.get("clipped", 0) + int(new[:, 0].sum())
            found["fell_back"] = found.get("fell_back", 0) + int(new[:, 2].sum())
            lowest, at = _headroom(seen, graph.largest).min(0)
            if float(lowest) < least and not measured:
                least = float(lowest)
                found |= {"fp8_headroom": least, "nearest_fp8": graph.labels[int(at)]}
        return found


def _headroom(seen: Tensor, largest: Tensor) -> Tensor:
    """In powers of two, ``[V]``; inf for an operand that was all 0."""
    return torch.log2(largest * seen[:, INV_SCALE] / seen[:, AMAX]).nan_to_num(math.inf, math.inf)
