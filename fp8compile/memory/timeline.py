"""The most bytes alive at one time in forward and backward, for a backward that repeats some of the forward's operations.

The walk is that of ``analysis/liveness.py``, over steps of graphs that are not made yet. What is kept for the backward:

    forward     a kept value takes its stored bytes from where it is made to the end; itself, until its last reader
    backward    stored bytes until the last reader; decoded, where a matmul reads it, from its first reader to its last
    residual    a value kept as codes that is read on both sides of a matmul is stored itself too (passes/store_residuals.py)

Gradients of parameters count from where they are made: a tight budget has its peak where most of them exist, a loose one
where most is kept. Left out, since they are there in any case: parameters and the caller's data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from torch.fx import Node

from fp8compile.analysis.liveness import most_alive
from fp8compile.analysis.residuals import residuals_of, stored_residuals
from fp8compile.analysis.stored_values import TimelineStep, limits_in_force, step_of, steps_of
from fp8compile.fx.graph import TAKEN_AS_CODES, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor


class Timeline:
    """Forward and backward of one partitioned graph, which must not change meanwhile.

    Args:
        split: the graph.
        stored: for storages that are kept as codes, the bytes that these take; others are kept as they are.
    """

    def __init__(self, split: PartitionedGraph, stored: Mapping[Node, int]) -> None:
        self.split, self.stored = split, stored
        self._limits = limits_in_force()
        self._known = {node: step_of(node) for half in (split.fw, split.bw) for node in half.graph.nodes}
        self._residuals = residuals_of(split.fw.graph, saved_is_stored=False)

    def bytes_kept(self, edges: Iterable[SavedTensor], exact: Set[Node] = frozenset()) -> int:
        """Bytes that ``edges`` keep alive for the backward, each storage once, without what the caller owns.

        ``exact`` are storages that are kept as they are, although they could be codes.
        """
        return sum(self._kept(edges, exact).values())

    def peak(self, kept: Sequence[SavedTensor], repeated: Sequence[Node], exact: Set[Node] = frozenset()) -> int:
        """The most bytes alive at one time if the forward keeps ``kept`` and the backward repeats ``repeated``.

        ``repeated`` are nodes of the forward, in its order; ``exact`` as in ``bytes_kept``.
        """
        return max(self._of_forward(kept, exact), self._of_backward(kept, repeated, exact))

    def _kept(self, edges: Iterable[SavedTensor], exact: Set[Node]) -> dict[Node, int]:
        roots = dict.fromkeys(storage_root(e.forward) for e in edges if e.is_tensor)
        own = [root for root in roots if not self.split.caller_owns(root)]
        return {r: self.stored[r] if r in self.stored and r not in exact else nbytes(r.meta["val"]) for r in own}

    def _of_forward(self, kept: Sequence[SavedTensor], exact: Set[Node]) -> int:
        sizes = self._kept(kept, exact)
        inputs = set(self.split.inputs)
        codes = {root for root in sizes if root in self.stored and root not in exact}
        residuals = stored_residuals(self._residuals, lambda node: node in codes or TAKEN_AS_CODES in node.meta)
        steps = steps_of(self._needed(kept, codes), inputs, set(residuals), self._known)
        end = TimelineStep()
        for node in self.split.user_outputs:
            if isinstance(node, Node):
                end.read(steps[node])
        alive, behind = 0, dict[TimelineStep, TimelineStep]()
        for root, size in sizes.items():
            if root in inputs or root not in codes:  # kept as it is: from its start to the end
                end.read(steps[root])
                alive += size if root in inputs else 0
            else:
                encoded = behind[steps[root]] = TimelineStep(size, "pointwise", stored=True)
                encoded.read(steps[root])
                end.read(encoded)
        order = [*(each for s in steps.values() for each in (s, behind.get(s)) if each), end]
        return most_alive(order, self._limits, alive)

    def _needed(self, kept: Sequence[SavedTensor], codes: Set[Node]) -> list[Node]:
        """The forward's nodes that its results are made of; codes are made where the storage that they stand for is."""
        saved = (storage_root(e.forward) if storage_root(e.forward) in codes else e.forward for e in kept)
        waiting = [*(n for n in self.split.user_outputs if isinstance(n, Node)), *self.split.inputs, *saved]
        needed = set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        return [node for node in self.split.fw.graph.nodes if node in needed]

    def _of_backward(self, kept: Sequence[SavedTensor], repeated: Sequence[Node], exact: Set[Node]) -> int:
        sizes = self._kept(kept, exact)
        stored = {root for root in sizes if root in self.stored and root not in exact}
        late = _Backward(self.split, kept, repeated, self._known, stored)
        return most_alive(late.order, self._limits, sum(sizes.values()), late.held(sizes))


class _Backward:
    """The steps of a backward that repeats operations of the forward: ``order``."""

    def __init__(
        self,
        split: PartitionedGraph,
        kept: Sequence[SavedTensor],
        repeated: Sequence[Node],
        known: Mapping[Node, TimelineStep],
        stored: Set[Node],
    ) -> None:
        self.kept, self._known = kept, known
        self.given = {
            e.backward: TimelineStep(counted=True, holds_codes=storage_root(e.forward) in stored) for e in kept
        }
        self.decoded = {
            e.backward: self._decoded(e) for e in kept if e.is_tensor and storage_root(e.forward) in stored
        }
        self._copies: dict[Node, TimelineStep] = {}
        self._used = {edge.forward: edge.backward for edge in kept}
        made = {edge.backward: edge.forward for edge in split.edges}
        placed = first_uses(split, repeated)
        own: dict[Node, TimelineStep] = {}
        order: list[TimelineStep] = []
        for at, node in enumerate(split.bw.graph.nodes):
            order += [self._copy(each) for each in placed.get(at, ())]
            if node in made:
                continue
            step = own[node] = known[node].alone()
            order.append(step)
            for parent in node.all_input_nodes:
                step.read(own[parent] if parent in own else self._value(made[parent]))
        self.order = [*self.given.values(), *self._with_decoded(order)]

    def held(self, sizes: Mapping[Node, int]) -> dict[tuple[TimelineStep, ...], int]:
        """For each storage of ``sizes``, the steps that stand for it, and its bytes."""
        found: dict[Node, list[TimelineStep]] = {}
        for edge in self.kept:
            if (root := storage_root(edge.forward)) in sizes:
                found.setdefault(root, []).append(self.given[edge.backward])
        return {tuple(steps): sizes[root] for root, steps in found.items()}

    def _decoded(self, edge: SavedTensor) -> TimelineStep:
        step = TimelineStep(nbytes(edge.forward.meta["val"]), "pointwise")
        step.read(self.given[edge.backward])
        return step

    def _copy(self, node: Node) -> TimelineStep:
        step = self._copies[node] = self._known[node].alone()
        for parent in node.all_input_nodes:
            if parent in self._copies or parent in self._used:
                step.read(self._value(parent))
        return step

    def _value(self, made: Node) -> TimelineStep:
        """What the backward reads for a value of the forward: its copy, or what was kept of it, decoded."""
        if made in self._copies:
            return self._copies[made]
        used = self._used[made]
        return self.decoded.get(used, self.given[used])

    def _with_decoded(self, order: list[TimelineStep]) -> Iterator[TimelineStep]:
        """The order with each decoding directly before its first reader."""
        waiting = {id(step): step for step in self.decoded.values()}
        for step in order:
            for read in step.reads:
                if waiting.pop(id(read), None):
                    yield read
            yield step


def first_uses(split: PartitionedGraph, repeated: Sequence[Node]) -> dict[int, list[Node]]:
    """For each position in the backward, the forward's nodes to repeat directly before it, in the forward's order.

    Each is repeated before its first reader: an operation of the backward, or another repeated one.
    """
    position = {node: at for at, node in enumerate(split.bw.graph.nodes)}
    again = set(repeated)
    first: dict[Node, int] = {}
    for edge in split.edges:
        if edge.forward in again and edge.backward.users:
            at = min(position[user] for user in edge.backward.users)
            first[edge.forward] = min(first.get(edge.forward, at), at)
    found: dict[int, list[Node]] = {}
    for node in reversed(repeated):
        if node not in first:
            continue  # nothing needs it
        found.setdefault(first[node], []).append(node)
        for parent in node.all_input_nodes:
            if parent in again:
                first[parent] = min(first.get(parent, first[node]), first[node])
    return {at: nodes[::-1] for at, nodes in found.items()}
