"""The waterfall of one graph that was cut: how many bytes each pass took away, and what the bytes that are left hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch.fx import Graph, Node

from fp8compile.compiler.region_reports import Cut, calls_that_keep
from fp8compile.fx.graph import EXACT, SPLICED, encoding_of, is_on_host, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.provenance import TensorInfo
from fp8compile.fx.regions import saves_itself
from fp8compile.reporting.entries import SAVED, Notes, Recomputed
from fp8compile.reporting.waterfall import (
    CHUNKED,
    CODES,
    COPIED,
    CUT,
    ENCODED,
    GIVEN_UP,
    NORMALISED,
    OBSERVED,
    OFFLOADED,
    OPERANDS,
    OTHER,
    RECOMPUTED,
    SAVED_STATISTICS,
    SOFTMAXES,
    STATES,
    SUMS,
    Amount,
    Waterfall,
    merged,
)

OF_PASS = {
    "drop_random_states": STATES,
    "copy_overwritten": COPIED,
    "save_sums": SUMS,
    "save_softmax": SOFTMAXES,
    "save_normalised": NORMALISED,
    "save_statistics": SAVED_STATISTICS,
    "recompute_kept": RECOMPUTED,
    "recompute_for_budget": GIVEN_UP,
    "encode_saved": ENCODED,
    "mark_saved": ENCODED,
    "offload_codes": OFFLOADED,
    "observe_forward": OBSERVED,
    "measure_operands": OBSERVED,
}


def recomputed_by_cut(split: PartitionedGraph, plain: PartitionedGraph, joint: Notes) -> Notes:
    """What plain Inductor saves and our cut does not, not even as codes; ``split`` is the graph right after the cut.

    ``joint`` is what was done to the joint graph: what is only computed in chunks has no entry here.
    """
    ours = _chunked(joint)
    ours |= {storage_root(e.forward).name for e in split.edges if e.is_tensor} | _encoded_operands(split)
    roots = dict.fromkeys(storage_root(e.forward) for e in _own(plain))
    return Notes(recomputed=tuple(Recomputed(TensorInfo.of(r), ()) for r in roots if r.name not in ours))


def bytes_in_chunks(plain: PartitionedGraph, notes: Notes) -> int:
    """Bytes that plain Inductor saves of what is computed in chunks."""
    roots = {storage_root(e.forward) for e in _own(plain)}
    return sum(nbytes(root.meta["val"]) for root in roots if root.name in _chunked(notes))


def _chunked(notes: Notes) -> set[str]:
    return {name for each in notes.chunked for name in each.members}


def _encoded_operands(split: PartitionedGraph) -> set[str]:
    """The storages that the saved codes of FP8 linears were made from."""
    waiting = [e.forward for e in split.edges if e.is_tensor and encoding_of(e.forward)]
    seen, found = set(waiting), set()
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if SPLICED not in node.meta:
                found.add(storage_root(node).name)
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return found


def waterfall_of(
    split: PartitionedGraph,
    plain_bytes: int,
    bytes_after: Sequence[tuple[str, int]],
    notes: Notes,
    cuts: Mapping[Graph, Cut],
    in_chunks: int = 0,
) -> Waterfall:
    """The waterfall of a graph and the regions it calls.

    ``bytes_after`` lists the passes on the two halves, the cut first, and the bytes saved after each; ``notes`` hold what
    passes did to this graph itself. Of ``plain_bytes``, ``in_chunks`` are those of what is computed in chunks.
    """
    inside = sum((cut.report.waterfall for _, cut in calls_that_keep(split, cuts)), Waterfall())
    in_regions = sum(change.nbytes for change in inside.changes)
    saved = split.saved_bytes()
    cut = bytes_after[0][1] - plain_bytes - in_regions + in_chunks
    operands = [s for s in notes.saved if s.is_operand]
    less = sum(s.bytes_after - s.bytes_before for s in operands)
    by_cut = sum(1 for r in notes.recomputed if not r.sources)
    changes = [Amount(CHUNKED, -in_chunks, len(notes.chunked))]
    changes += [Amount(CUT, cut - less, by_cut), Amount(OPERANDS, less, len(operands))]
    for_budget = sum(r.for_budget for r in notes.recomputed)
    recomputed = len(notes.recomputed) - by_cut - for_budget
    tensors = {RECOMPUTED: recomputed, GIVEN_UP: for_budget, ENCODED: len(notes.saved) - len(operands)}
    tensors[OFFLOADED] = len(notes.offloaded)
    for (_, before), (name, after) in pairwise(bytes_after):
        changes.append(Amount(OF_PASS[name], after - before, tensors.get(OF_PASS[name], 0)))
    parts = (*_parts(split, notes), *inside.parts)
    rest = saved - sum(part.nbytes for part in parts)
    return Waterfall(merged((*changes, *inside.changes)), merged((*parts, Amount(OTHER, rest))))


def _parts(split: PartitionedGraph, notes: Notes) -> Iterable[Amount]:
    return (Amount(label, nbytes(root.meta["val"]), 1) for root, label in labels_of(split, notes).items())


def labels_of(split: PartitionedGraph, notes: Notes) -> dict[Node, str]:
    """What each storage that the graph itself saves on the device holds: codes, or a tensor that was left for a reason."""
    reasons = {skip.name: skip.reason for skip in notes.skipped(SAVED)}
    labels: dict[Node, str] = {}
    for edge in _own(split):
        root = storage_root(edge.forward)
        if is_on_host(root):
            continue
        is_code = SPLICED in edge.forward.meta and EXACT not in root.meta
        label = CODES if is_code else reasons.get(edge.info.name, OTHER)
        if labels.get(root, OTHER) == OTHER:
            labels[root] = label
    return labels


def _own(split: PartitionedGraph) -> list[SavedTensor]:
    return [edge for edge in split.edges if saves_itself(split, edge)]
