"""The picture of a graph that was cut: what its forward keeps for the backward, and what is in memory at each operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import Node

from fp8compile.analysis.liveness import Held, Span, kept_storages, spans, steps_of_backward, steps_of_forward
from fp8compile.analysis.stored_values import PLAIN, RealizeLimits, TimelineStep, limits_in_force
from fp8compile.compiler.graph_waterfall import labels_of
from fp8compile.explorer.picture import (
    BACKWARD,
    CALLERS,
    FORWARD,
    KEPT,
    KEPT_CODES,
    ON_HOST,
    REGIONS,
    KeptValue,
    Lifetime,
    MemoryTimeline,
    Picture,
)
from fp8compile.fx.graph import is_on_host, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.provenance import TensorInfo, module_path
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.waterfall import CODES


def picture_of(split: PartitionedGraph, plain: PartitionedGraph, notes: Notes) -> Picture:
    """The picture of ``split``, beside the timeline of ``plain``, what plain Inductor makes of the same graph.

    ``notes`` hold what passes did to the graph itself.
    """
    labels = labels_of(split, notes)
    codes = {root for root, label in labels.items() if label == CODES}
    ours, plains = timeline_of(split, codes, limits_in_force()), timeline_of(plain, set(), PLAIN)
    return Picture(tuple(_kept(split, labels)), ours, plains)


def _kept(split: PartitionedGraph, labels: Mapping[Node, str]) -> Iterator[KeptValue]:
    for edge in split.edges:
        if not edge.is_tensor:
            continue
        root = storage_root(edge.forward)
        callers = split.caller_owns(root)
        away = is_on_host(root)
        label = CALLERS if callers else ON_HOST if away else labels.get(root, REGIONS)
        size = 0 if callers or away else nbytes(root.meta["val"])
        yield KeptValue(edge.forward.name, edge.backward.name, root.name, size, label)


def timeline_of(split: PartitionedGraph, codes: set[Node], limits: RealizeLimits) -> MemoryTimeline:
    """What is in memory when; ``codes`` are the storages that hold codes, ``limits`` those of Inductor."""
    forward, backward = steps_of_forward(split), steps_of_backward(split)
    first, kept = len(forward[0]), kept_storages(split)
    until = {span.steps: span.end + first for span in _spans(backward, limits) if span.start < 0}
    names = {tuple(backward[0][n] for n in nodes): root for root, nodes in kept.items()}
    ends = {root: until[steps] for steps, root in names.items()}
    made: list[Lifetime] = []
    for root in kept:
        if root.op == "placeholder":
            made.append(_lifetime(root, _kind(root, codes), 0, ends[root]))
    for node, span in _own(forward, limits):
        if node in ends:
            made.append(_lifetime(node, _kind(node, codes), span.start, ends[node]))
        else:
            made.append(_lifetime(node, FORWARD, span.start, span.end))
    for node, span in _own(backward, limits):
        made.append(_lifetime(node, BACKWARD, span.start + first, span.end + first))
    operations = tuple(node.name for half in (forward, backward) for node in half[0])
    return MemoryTimeline(operations, first, tuple(made))


def _kind(root: Node, codes: set[Node]) -> str:
    return KEPT_CODES if root in codes else KEPT


def _spans(half: tuple[dict[Node, TimelineStep], Held], limits: RealizeLimits) -> Iterator[Span]:
    steps, held = half
    return spans(list(steps.values()), limits, held)


def _own(half: tuple[dict[Node, TimelineStep], Held], limits: RealizeLimits) -> Iterator[tuple[Node, Span]]:
    """The nodes whose results are in memory, and when."""
    nodes = {step: node for node, step in half[0].items()}
    for span in _spans(half, limits):
        if span.start >= 0:
            yield nodes[span.steps[0]], span


def _lifetime(node: Node, kind: str, start: int, end: int) -> Lifetime:
    info = TensorInfo.of(node)
    return Lifetime(node.name, str(info), module_path(node), kind, start, end, info.nbytes)
