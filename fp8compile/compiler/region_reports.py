"""Reports of nested compile regions: what was done in each, once for each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from fp8compile.fx.graph import called, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.provenance import module_path
from fp8compile.fx.regions import Region, kept_by_region
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import SAVED, Notes
from fp8compile.reporting.entry import Entry


@dataclass(frozen=True)
class Cut:
    """What was done to one region: its report as if called once, and the storages that plain Inductor would keep in it.

    A storage is ``(position, bytes)``, the position that of the operand it belongs to, or None.
    """

    region: Region
    report: GraphReport
    plain: tuple[tuple[int | None, int], ...] = ()


def plain_bytes(plain: PartitionedGraph, cuts: Mapping[Graph, Cut]) -> int:
    """What plain Inductor would keep in a caller. ``plain`` is its cut, in which the regions are rewritten already."""
    kept, calls = {}, []
    for edge in plain.edges:
        if edge.is_tensor and kept_by_region(edge.forward):
            calls.append(edge.forward.args[0])
        elif edge.is_tensor:
            root = storage_root(edge.forward)
            kept[root] = nbytes(root.meta["val"])
    own = 0
    for call in dict.fromkeys(calls):
        body = called(call)  # type: ignore[arg-type]
        assert body is not None
        for position, size in cuts[body.graph].plain if body.graph in cuts else ():
            if position is None:
                own += size
            else:
                kept[storage_root(call.args[2 + position])] = size  # type: ignore[union-attr, arg-type]
    return own + sum(size for root, size in kept.items() if not plain.caller_owns(root))


def notes_of_calls(split: PartitionedGraph, cuts: Mapping[Graph, Cut]) -> Notes:
    """What was done in the regions that a forward calls, once for each call, in the modules that make the calls."""
    keeping = {call for call, _ in calls_that_keep(split, cuts)}
    notes = Notes()
    for call, cut in calls_of_cuts(split, cuts):
        found = cut.report.notes
        if call not in keeping:  # in a checkpoint: nothing is kept, the backward calls it once more
            others = tuple(skip for skip in found.skips if skip.kind != SAVED)
            found = dataclasses.replace(found, saved=(), skips=others, recomputed=())
        own = tuple(dataclasses.replace(s, belongs_to="") for s in found.saved)  # inputs and results of the region
        notes += _moved(dataclasses.replace(found, saved=own), cut.region.path, module_path(call))
    return notes


def calls_of_cuts(split: PartitionedGraph, cuts: Mapping[Graph, Cut]) -> list[tuple[Node, Cut]]:
    found = ((node, called(node)) for node in split.fw.graph.nodes)
    return [(node, cuts[body.graph]) for node, body in found if body is not None and body.graph in cuts]


def calls_that_keep(split: PartitionedGraph, cuts: Mapping[Graph, Cut]) -> list[tuple[Node, Cut]]:
    """The calls of regions of which something is saved: not those in a checkpoint, which the backward calls once more."""
    keeping = {e.forward.args[0] for e in split.edges if e.is_tensor and kept_by_region(e.forward)}
    return [(call, cut) for call, cut in calls_of_cuts(split, cuts) if call in keeping]


def _moved(notes: Notes, path: str, to: str) -> Notes:
    if path == to:
        return notes

    def moved(entry: Entry) -> Entry:
        origin = entry.origin
        if not path or not (origin.module == path or origin.module.startswith(f"{path}.")):
            return entry
        origin = dataclasses.replace(origin, module=to + origin.module[len(path) :])
        return dataclasses.replace(entry, info=dataclasses.replace(entry.info, origin=origin))

    entries: dict[str, Any] = {name: tuple(map(moved, getattr(notes, name))) for name in Notes.ENTRIES}
    return Notes(**entries)
