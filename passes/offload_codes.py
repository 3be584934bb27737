"""Numbers stay as they are: codes wait for the backward in the host's memory, and come back as they were.

    Recipe(memory={"offload": "auto"})    the codes whose copies are predicted to be hidden behind the graph, both ways
    Recipe(memory={"offload": "all"})     all codes that may go, also where the device has to wait for them

Copies run beside the graph, one at a time each way (fp8compile/memory/link.py), in torch's own operators, whose streams and
events fp8compile/memory/moving.py argues. Times are a roofline of each operation and bytes over the link
(fp8compile/cost/device_rates.py): predicted, not measured. On a device without rates they are those of an H100. What has
no predicted time counts as none, so fewer copies pass for hidden.

What goes is a storage of one-byte codes that only the forward made: those of ``encode_saved`` and of FP8 linears. Views of it
are made again in the backward. Its device memory is free from where the copy has arrived to where the copy back begins, so
what is made first is away longest. Scales stay, and so does what is smaller than LEAST_BYTES: a copy has a fixed cost.
Under a ``memory.budget``, codes of what the budget keeps are offloaded: the budget is met without them.

Left, with the reason: what is needed at once, what the link cannot hide beside the others, small codes, codes in an order of
memory that a copy would change, symbolic sizes, devices other than GPUs of CUDA (or ROCm) and CPUs, torch before
2.12 on a GPU. On a CPU the copies are plain ones, made when a GPU's would be done: for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.cost.clock import Clock
from fp8compile.cost.device_rates import DeviceRates
from fp8compile.fx.graph import (
    NOT_STATIC,
    SPLICED,
    insertion_point_after,
    is_on_host,
    is_static,
    nbytes,
    storage_root,
)
from fp8compile.fx.order import sink_recomputed
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.provenance import TensorInfo, module_path
from fp8compile.fx.regions import saves_itself
from fp8compile.fx.spec import ONE_BYTE
from fp8compile.memory.link import Trip, hidden, times_of
from fp8compile.memory.moving import send_to_host
from fp8compile.recipe.context import Context
from fp8compile.recipe.rates import rates_or_assumed
from fp8compile.reporting.entries import OFFLOAD, Notes, Offloaded, Skip

LEAST_BYTES = 2**20  # 21 us at 50 GB/s, about what torch's operators take to begin a copy
SMALL = "fewer than 1 MiB"
ORDER = "its memory is not in the order of its dimensions"
NO_OPERATORS = "this torch has no operators for it: 2.12 has"
OTHER_DEVICE = "it is on {}: copies beside the graph are for CUDA"


def offload_codes(split: PartitionedGraph, ctx: Context) -> Notes:
    """Let codes wait for the backward on the host, or say why not."""
    if not ctx.recipe.offloads:
        return Notes()
    storages = _codes(split)
    infos = {root: replace(TensorInfo.of(root), name=edges[0].backward.name) for root, edges in storages.items()}
    reasons = {root: _reason_to_stay(root, edges, ctx) for root, edges in storages.items()}
    going = [root for root, reason in reasons.items() if reason is None]
    if not going:
        return Notes(skips=tuple(Skip(infos[root], str(reason), OFFLOAD) for root, reason in reasons.items()))
    sink_recomputed(split.bw.graph)
    rates = rates_or_assumed(split.inputs, ctx.recipe)
    forward, backward = (Clock(half.graph, rates) for half in (split.fw, split.bw))
    reads = {root: min(backward.starts[edge.in_order[0]] for edge in storages[root]) for root in going}
    trips = [_trip(root, forward, reads[root], rates, ctx) for root in going]
    taken, left = hidden(trips, forward.length)
    times = dict(zip(taken, times_of([trips[i] for i in taken], forward.length), strict=True))
    for i in sorted(taken, key=lambda i: times[i].back):  # copies back wait for each other in this order
        send_to_host(split, storages[going[i]], times[i], forward, backward)
    reasons |= {going[i]: reason for i, reason in left.items()}
    skips = (Skip(infos[root], reason, OFFLOAD) for root, reason in reasons.items() if reason)
    done = (Offloaded(infos[going[i]], trips[i].us, times[i].waits, rates.name) for i in taken)
    return Notes(skips=tuple(skips), offloaded=tuple(done))


def _codes(split: PartitionedGraph) -> dict[Node, list[SavedTensor]]:
    """The storages of codes that are saved for the backward on the device, each with what the backward reads of it."""
    found: dict[Node, list[SavedTensor]] = {}
    for edge in split.edges:
        if saves_itself(split, edge) and edge.backward.users:
            found.setdefault(storage_root(edge.forward), []).append(edge)
    return {root: edges for root, edges in found.items() if _is_codes(root)}


def _is_codes(root: Node) -> bool:
    return SPLICED in root.meta and root.meta["val"].dtype in ONE_BYTE and not is_on_host(root)


def _reason_to_stay(root: Node, edges: Sequence[SavedTensor], ctx: Context) -> str | None:
    """Why a storage stays on the device whatever the link could do."""
    value = root.meta["val"]
    if reason := ctx.skip_reason(module_path(root), "memory.offload", ()):
        return reason
    if not all(map(is_static, (root, *(edge.forward for edge in edges)))):
        return NOT_STATIC
    if value.device.type not in ("cuda", "cpu"):
        return OTHER_DEVICE.format(value.device.type)
    if value.device.type == "cuda" and private.transfers() is None:
        return NO_OPERATORS
    if nbytes(value) < LEAST_BYTES:
        return SMALL
    return None if value.is_contiguous() else ORDER


def _trip(root: Node, forward: Clock, read: float, rates: DeviceRates, ctx: Context) -> Trip:
    anyway = ctx.recipe_at(module_path(root)).memory.offload == "all"
    us = rates.microseconds_to_host(nbytes(root.meta["val"]))
    return Trip(forward.starts[insertion_point_after(root)], read, us, anyway)
