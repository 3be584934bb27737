"""A calibration's measurements, found again in the graph that is compiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from fp8compile.analysis.dataflow import Source, sources
from fp8compile.fx.aot import BACKWARD, FORWARD, is_training
from fp8compile.fx.graph import dtype_text, is_tensor, storage_root
from fp8compile.fx.ops import is_view
from fp8compile.fx.provenance import module_path, op_name, source_line
from fp8compile.islands.upcast import can_widen
from fp8compile.recipe.calibration import INFERENCE, RECALIBRATE, TRAINING, CalibratedValue, Calibration, Measurements


@dataclass(frozen=True)
class Measured:
    """The verdicts on the nodes of one graph."""

    calibration: Calibration
    values: Mapping[Node, CalibratedValue]

    def overflow_reason(self, node: Node) -> str | None:
        """Why the value of a node does not fit FP16; None if it fits or nothing is known of it. A view counts as its root."""
        value = self.values.get(storage_root(node))
        return None if value is None else self.calibration.overflow_reason(value)

    def fits(self, node: Node) -> bool:
        """Whether it fits FP16."""
        return self.overflow_reason(node) is None


def measured(calibration: Calibration, graph: Graph) -> Measured | None:
    """What is known of the nodes of a joint or inference graph; None for an inference graph that was not measured.

    Raises:
        ValueError: a training graph that was not measured; names the first value that differs.
    """
    nodes = measured_nodes(graph)
    here = values_of(graph, nodes)
    kind, keys = kind_of(graph), tuple(value.key for value in here)
    known = [g for g in calibration.graphs if g.kind == kind]
    found = next((g for g in known if g.keys == keys), None)
    if found is not None or not here:
        return Measured(calibration, dict(zip(nodes, found.values if found else (), strict=True)))
    if kind == TRAINING:
        raise ValueError(_difference(known, here))
    return None


def measured_nodes(graph: Graph) -> list[Node]:
    """The nodes that are measured: those that can be computed in FP32 instead, without views and tuples."""
    return [n for n in graph.nodes if can_widen(n) and is_tensor(n) and not is_view(n)]


def values_of(graph: Graph, nodes: Iterable[Node]) -> list[CalibratedValue]:
    """The entries of ``nodes`` in a calibration, without amax."""
    known = sources(graph, frozenset())
    directions = {node: BACKWARD if Source.GRADIENT in known[node] else FORWARD for node in nodes}
    return [
        CalibratedValue(n.name, op_name(n), module_path(n), source_line(n), direction, dtype_text(n.meta["val"]))
        for n, direction in directions.items()
    ]


def kind_of(graph: Graph) -> str:
    """ "training" for a joint graph, "inference" for one without a backward."""
    return TRAINING if is_training(graph) else INFERENCE


def _difference(known: Sequence[Measurements], here: Sequence[CalibratedValue]) -> str:
    """Where a training graph differs from the recorded one that it is most like."""
    if not known:
        return f"this calibration holds no training graph, and a training graph is compiling. {RECALIBRATE}."

    def agreeing(graph: Measurements) -> int:
        pairs = enumerate(zip(graph.keys, (value.key for value in here), strict=False))
        return next((i for i, (old, new) in pairs if old != new), min(len(graph.keys), len(here)))

    nearest = max(known, key=agreeing)
    at = agreeing(nearest)
    expected, found = (
        str(values[at]) if at < len(values) else "the end of the graph" for values in (nearest.values, here)
    )
    return (
        f"this calibration is not of this graph: 16-bit value {at + 1} was {expected} when it was made, and is {found} now. "
        f"If the model or how it is called has changed, calibrate again; if this is another path through it, or another "
        f"shape, give fp8compile.calibrate a batch that takes it too."
    )
