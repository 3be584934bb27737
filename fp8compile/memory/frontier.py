"""What to give up for memory, one value after the other, and the peak and the time of each state on the way.

    next value      the one with the most bytes saved per microsecond of repeating, given what is repeated already
    among equals    the one that makes the shortest stretch that is repeated as a whole, so that every second layer's input
                    goes before every first; then the earliest in the forward: its copy is made late, where little is alive
    sources         a kept value that a repeated matmul or attention is made from counts as exact, not as codes: what its
                    error does would have to be argued through all that the forward does with it
    state           all values given up so far; its peak by ``timeline``
    chosen          of the states whose peak is within the budget, the first: the one that costs the least time

Each state gives up all that the one before it does. So a smaller budget never has a higher peak: if the state for it is
another one, the peak of the state for the larger budget was above the smaller budget.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.cost.device_rates import DeviceRates
from fp8compile.cost.op_cost import microseconds
from fp8compile.fx.graph import is_tensor, nbytes, storage_root
from fp8compile.fx.ops import contracts, is_attention
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.memory.repeatable import Repeatable
from fp8compile.memory.timeline import Timeline

STATES = 32  # whose peak is looked at, at most: the others lie between two of them
SMALL = 4096  # bytes: what takes less stays, so that a budget is not spent on kernels of a few bytes
DIGITS = 6  # of a price: layers that are alike differ in rounding only

Rank = tuple[float, int, int]


@dataclass(frozen=True)
class Candidate:
    """Values of the forward that are given up together: those of one storage, or of one attention.

    ``at`` is where the first of them stands in the forward.
    """

    edges: tuple[SavedTensor, ...]
    at: int

    @property
    def values(self) -> set[Node]:
        return {edge.forward for edge in self.edges}


@dataclass(frozen=True)
class Offer:
    """What giving up a candidate does: what is repeated then, which sources become exact, bytes, time, and how long a stretch
    of values, in bytes, is alive together in the backward."""

    new: frozenset[Node]
    exact: frozenset[Node]
    saves: int
    us: float
    stretch: int

    def rank(self, at: int) -> Rank:
        """Lower is better."""
        price = self.us / self.saves
        return float(f"{price:.{DIGITS}g}"), self.stretch, at


@dataclass(frozen=True)
class State:
    """What is given up, and what that does.

    Attributes:
        kept: what stays saved for backward.
        repeated: nodes of the forward that the backward repeats, in the forward's order.
        saved: bytes saved for backward.
        peak: the most bytes alive at one time; see ``timeline``.
        us: predicted microseconds of repeating.
    """

    kept: tuple[SavedTensor, ...]
    repeated: tuple[Node, ...]
    saved: int
    peak: int
    us: float

    def given_up(self, split: PartitionedGraph) -> list[SavedTensor]:
        """What the graph saves and does not keep in this state."""
        kept = set(self.kept)
        return [edge for edge in split.edges if edge not in kept]


class Frontier:
    """The states of one partitioned graph, which must not change meanwhile.

    Args:
        split: the graph.
        repeatable: what the backward can make again.
        timeline: its peaks.
        rates: of the device that the times are predicted for.
        may_go: whether the recipe lets a value be given up.
    """

    def __init__(
        self,
        split: PartitionedGraph,
        repeatable: Repeatable,
        timeline: Timeline,
        rates: DeviceRates,
        may_go: Callable[[SavedTensor], bool],
    ) -> None:
        self.split, self.repeatable, self.timeline, self.may_go = split, repeatable, timeline, may_go
        self._us = {node: microseconds(node, rates) for node in split.fw.graph.nodes if repeatable.is_pure(node)}
        self.kept = {edge.forward for edge in split.edges}
        self.repeated: set[Node] = set()
        self.exact: set[Node] = set()

    def states(self) -> list[State]:
        """The states from nothing given up to all that can be, ``STATES`` at most besides the first."""
        found, number = [self._state()], 0
        candidates = self._candidates()
        stops = {math.ceil(len(candidates) * i / STATES) for i in range(1, STATES + 1)}
        for number, _ in enumerate(self._in_turn(candidates), 1):
            if number in stops:
                found.append(self._state())
        return found if number in stops or not number else [*found, self._state()]

    def _candidates(self) -> list[Candidate]:
        """The values that may be given up, by storage; results of one attention go together."""
        together: dict[Node, list[SavedTensor]] = {}
        for edge in self.split.edges:
            if edge.is_tensor:
                together.setdefault(_source(edge.forward), []).append(edge)
        return [
            Candidate(tuple(edges), self.repeatable.position(source))
            for source, edges in together.items()
            if source.op == "call_function"
            and not self.split.costs_nothing_to_keep(source)
            and all(map(self.may_go, edges))
            and self.timeline.bytes_kept(edges) >= SMALL
        ]

    def _in_turn(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Give up one candidate after the other, until none is left that can be made again and saves anything."""
        left = list(range(len(candidates)))
        while left:
            before, later = len(self.kept), list[int]()
            yield from self._best_first(candidates, left, later)
            left = later if len(self.kept) < before else []

    def _best_first(self, candidates: Sequence[Candidate], these: list[int], later: list[int]) -> Iterator[Candidate]:
        """Give up these candidates by number, best first; those that save nothing yet are put into ``later``."""

        def offered(i: int) -> Offer | None:
            offer = self._offer(candidates[i])
            if offer is not None and offer.saves <= 0:
                later.append(i)
                return None
            return offer

        waiting = [(offer.rank(candidates[i].at), i) for i in these if (offer := offered(i))]
        heapq.heapify(waiting)
        while waiting:
            _, i = heapq.heappop(waiting)
            offer = offered(i)  # cheaper than before where another has paid, dearer where a source is gone
            if offer is None:
                continue
            rank = offer.rank(candidates[i].at)
            if waiting and rank > waiting[0][0]:
                heapq.heappush(waiting, (rank, i))
                continue
            self.repeated |= offer.new
            self.exact |= offer.exact
            self.kept -= candidates[i].values
            yield candidates[i]

    def _offer(self, candidate: Candidate) -> Offer | None:
        """What giving up a candidate would do now; None if it cannot be made again."""
        values = candidate.values
        new = self.repeatable.made_from(values, self.kept, self.repeated, without=values)
        if new is None:
            return None
        exact = self._exact_sources(values, new)
        saves = self.timeline.bytes_kept(candidate.edges, self.exact) - self._dearer(exact)
        us = sum(self._us[node] for node in new)
        return Offer(frozenset(new), frozenset(exact), saves, us, self._stretch(new))

    def _exact_sources(self, values: set[Node], new: set[Node]) -> set[Node]:
        """The storages that a repeated matmul or attention is made from without another in between, and were not before."""
        waiting = [n for node in new if contracts(node) for n in node.all_input_nodes]
        if any(storage_root(value) in self.exact for value in values):
            waiting += values
        found, seen = set[Node](), set[Node]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.kept and node not in values:
                found.add(storage_root(node))
            elif node in new and not contracts(node):
                waiting += node.all_input_nodes
        return found - self.exact

    def _dearer(self, exact: set[Node]) -> int:
        """By how many bytes kept storages grow if these are no longer codes."""
        return sum(
            nbytes(root.meta["val"]) - self.timeline.stored[root] for root in exact & self.timeline.stored.keys()
        )

    def _stretch(self, new: set[Node]) -> int:
        """Bytes of the results of matmuls and attention that are repeated together, from kept values on."""
        waiting, seen, size = list(new), set[Node](), 0
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in new or node in self.repeated:
                size += nbytes(node.meta["val"]) if contracts(node) and is_tensor(node) else 0
                waiting += node.all_input_nodes
        return size

    def _state(self) -> State:
        kept = tuple(edge for edge in self.split.edges if edge.forward in self.kept)
        repeated = tuple(self.repeatable.in_order(self.repeated))
        us = sum(self._us[node] for node in repeated)
        saved = self.timeline.bytes_kept(kept, self.exact)
        return State(kept, repeated, saved, self.timeline.peak(kept, repeated, self.exact), us)


def chosen(states: Sequence[State], budget: int) -> State:
    """The first state whose peak is within ``budget`` bytes; the one with the lowest peak if none is."""
    within = (state for state in states if state.peak <= budget)
    return next(within, None) or min(states, key=lambda state: state.peak)


def _source(value: Node) -> Node:
    """The node whose memory a value is in; for a result of attention, the attention."""
    root = storage_root(value)
    parent = root.args[0] if root.target is private.getitem else None
    return parent if isinstance(parent, Node) and is_attention(parent) else root
