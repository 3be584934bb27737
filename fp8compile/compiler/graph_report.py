"""The report of one graph that was cut: what the passes did, and the bytes it keeps beside plain Inductor's."""

from __future__ import annotations

from collections.abc import Sequence

from fp8compile.analysis.liveness import Needs, gradient_bytes, needs
from fp8compile.analysis.sensitivity.foreign import assumed
from fp8compile.analysis.stored_values import PLAIN
from fp8compile.compiler.graph_waterfall import bytes_in_chunks, waterfall_of
from fp8compile.compiler.region_reports import calls_of_cuts, notes_of_calls, plain_bytes
from fp8compile.compiler.report_store import Collector
from fp8compile.fx.graph import unknown_sizes
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.running import Peaks

UNKNOWN_SIZES = (
    "unknown until the graph runs: {}; bytes that depend on it are counted for {}, an upper bound or a guess"
)

ASSUMED = (
    "taken to be linear in their gradients, as a backward is: {}; fp8compile.declare({!r}, exact=...) takes it back"
)


def report_of(
    split: PartitionedGraph,
    plain: PartitionedGraph,
    notes: Notes,
    bytes_after: Sequence[tuple[str, int]],
    remarks: tuple[str, ...],
    collector: Collector,
) -> GraphReport:
    """The report of a graph and of the regions it calls. A region's workspace is needed during its call.

    ``bytes_after`` lists the passes on the two halves, the cut first, and the bytes saved after each.
    """
    cuts = [cut for _, cut in calls_of_cuts(split, collector.cuts)]
    inside = [(cut.report.workspace_bytes, cut.report.workspace_bytes_plain) for cut in cuts] or [(0, 0)]
    working, working_plain = (max(sizes) for sizes in zip(*inside, strict=True))
    saved_by_plain = plain_bytes(plain, collector.cuts)
    ours, theirs = needs(split), needs(plain, PLAIN)
    return GraphReport(
        "training",
        notes + notes_of_calls(split, collector.cuts),
        split.saved_bytes(),
        saved_by_plain,
        tuple(
            dict.fromkeys(
                (
                    *remarks,
                    *_unknown(split),
                    *_assumed(split),
                    *collector.remarks,
                    *(r for cut in cuts for r in cut.report.remarks),
                )
            )
        ),
        ours.workspace + working,
        theirs.workspace + working_plain,
        _peaks(split, ours, working),
        _peaks(plain, theirs, working_plain),
        waterfall=waterfall_of(
            split, saved_by_plain, bytes_after, notes, collector.cuts, bytes_in_chunks(plain, notes)
        ),
    )


def _assumed(split: PartitionedGraph) -> list[str]:
    """What is taken for granted of operators that are not torch's, once for all of them."""
    names = assumed(split.bw.graph)
    return [ASSUMED.format(", ".join(names), names[0])] if names else []


def _peaks(split: PartitionedGraph, found: Needs, working: int) -> Peaks:
    """``working`` bytes are needed in regions that it calls, in one at a time."""
    return Peaks(found.forward + working, found.backward + working, gradient_bytes(split))


def _unknown(split: PartitionedGraph) -> list[str]:
    """The sizes of saved tensors that only a run knows, and how the bytes in the report count them."""
    sizes = unknown_sizes(edge.forward.meta["val"] for edge in split.edges if edge.is_tensor)
    counted = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
    return [UNKNOWN_SIZES.format(", ".join(sorted(sizes)), counted)] if sizes else []
