"""What generated kernels are predicted to take, guessed from a graph before Inductor fuses it.

    us = max(bytes / copy, instructions / lanes)        and a gap where a kernel is added

Inductor's scheduler decides which operations share a kernel. Guessed: those that are connected through generated operations
and views, or read the same tensor, with no product between them. Between two operations there is none if the same number of
products stands in the longest chain before each. What a backward computes from saved values alone is made where it is first
read.

Bytes are those of tensors that come from outside or are read outside. Instructions are ``INSTRUCTIONS`` for an element of an
operation, and two for each element that is loaded or stored. Of the layers that were lowered and disassembled for an H100
(benchmarks/studies/layer_instructions.py), kernels take so many within a third (tests/cost/test_generated.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.cost.device_rates import MICRO, TERA, DeviceRates
from fp8compile.fx.graph import is_tensor, nbytes, numel, size_hint
from fp8compile.fx.ops import contracts, is_generated, is_reduction, is_view_or_part, opname, readers

# Lane instructions an element, as disassembled for sm_90; an operation that is not named here takes one.
INSTRUCTIONS: Mapping[str, float] = {
    **dict.fromkeys(("erf", "erfc", "lgamma", "erfinv"), 28),
    **dict.fromkeys(("pow", "sin", "cos", "atan2", "tanh"), 20),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log1p", "reciprocal", "rsqrt", "sqrt"), 6),
    **dict.fromkeys(("sigmoid", "div", "silu"), 10),
    "inductor_random": 95,
    **dict.fromkeys(("gelu", "gelu_backward"), 36),
}
MOVED = 2  # instructions for an element that is loaded or stored


@dataclass(frozen=True)
class GuessedKernel:
    """Operations that are guessed to share a kernel.

    Attributes:
        nodes: these operations, without views.
        num_bytes: that it reads and writes.
        instructions: of all lanes.
        sums_rows: whether it holds a reduction along rows, as a norm's statistics.
    """

    nodes: frozenset[Node]
    num_bytes: int
    instructions: float
    sums_rows: bool

    def us(self, rates: DeviceRates, more_bytes: float = 0.0, more_instructions: float = 0.0) -> float:
        """Predicted microseconds, with so many more bytes and instructions; the gap is not in it."""
        return time_of(rates, self.num_bytes + more_bytes, self.instructions + more_instructions)


def time_of(rates: DeviceRates, num_bytes: float, instructions: float) -> float:
    """Microseconds that a generated kernel takes, without the gap."""
    return max(num_bytes / rates.copy, instructions / rates.lanes) / TERA / MICRO


class Kernels:
    """The generated kernels of a graph, guessed.

    Args:
        graph: a forward, or a backward.
        saved: of a backward, the inputs that are no gradients. What is computed from these without a product is made where
            it is read.
    """

    def __init__(self, graph: Graph, saved: Collection[Node] = ()) -> None:
        self.is_backward = bool(saved)
        self._products: dict[Node, int] = {}
        self._found: dict[Node, GuessedKernel] = {}
        for node in graph.nodes:
            first = int(node.op == "placeholder" and node not in saved)
            before = max((self._products[n] for n in node.all_input_nodes), default=first)
            self._products[node] = before + contracts(node)

    def around(self, node: Node) -> GuessedKernel:
        """The kernel that a generated operation is in; of what needs no gradient in a backward, the first that reads it."""
        if node not in self._found:
            kernel = kernel_of(self._connected(node, self._products[node] or self._first_reading(node)))
            alike = [n for n in kernel.nodes if self._products[n] == self._products[node]]
            self._found |= dict.fromkeys(alike if self._products[node] else [node], kernel)
        return self._found[node]

    def _first_reading(self, node: Node) -> int:
        """The fewest products before a generated operation that reads a value through such as need none."""
        if not self.is_backward:
            return 0
        found, seen, waiting = set[int](), {node}, [node]
        while waiting:
            new = {n for n in readers(waiting.pop()) if is_generated(n)} - seen
            seen |= new
            found |= {self._products[n] for n in new}
            waiting += [n for n in new if not self._products[n]]
        return min(found - {0}, default=0)

    def _connected(self, first: Node, products: int) -> frozenset[Node]:
        allowed = {products, 0} if self.is_backward else {products}
        found, waiting = {first}, [first]
        while waiting:
            near = {n for n in self._near(waiting.pop()) if is_generated(n) and self._products[n] in allowed} - found
            found |= near
            waiting += near
        return frozenset(found)

    def _near(self, node: Node) -> Iterator[Node]:
        """What a node reads, what reads it, and what reads the same of another kernel's making, if that is as large."""
        yield from readers(node)
        for operand in map(looked_at, filter(is_tensor, node.all_input_nodes)):
            yield operand
            if not is_generated(operand) and _size(operand) >= _size(node):
                yield from readers(operand)


def kernel_of(nodes: frozenset[Node]) -> GuessedKernel:
    """One kernel of these operations."""
    reads = loaded(nodes)
    writes = [value for node in nodes if any(r not in nodes for r in readers(node)) for value in _values(node)]
    moved = sum(map(numel, (*reads.values(), *writes)))
    instructions = sum(map(_instructions, nodes)) + MOVED * moved
    num_bytes = sum(map(nbytes, (*reads.values(), *writes)))
    return GuessedKernel(nodes, num_bytes, instructions, any(map(sums_rows, nodes)))


def loaded(nodes: Collection[Node]) -> dict[Node, Tensor]:
    """What operations of one kernel read from memory: each tensor once, and of a part or an expanded view no more than is."""
    found: dict[Node, Tensor] = {}
    for read in (n for node in nodes for n in node.all_input_nodes if is_tensor(n)):
        made, seen = looked_at(read), read.meta["val"]
        if made not in nodes:
            key, whole = (made, made.meta["val"]) if is_tensor(made) else (read, seen)
            part = min(seen, whole, key=numel)
            found[key] = max(part, found.get(key, part), key=numel)
    return found


def looked_at(node: Node) -> Node:
    """What a view, a part of a tuple, or a view of one shows."""
    while is_view_or_part(node) or node.target is private.getitem:
        node = node.all_input_nodes[0]
    return node


def sums_rows(node: Node) -> bool:
    """Whether an operation reduces the last dimension and no other."""
    if not is_reduction(node):
        return False
    x = node.all_input_nodes[0].meta["val"]
    size = size_hint(x.shape[-1]) if x.ndim else 1
    return size > 1 and all(numel(value) * size == numel(x) for value in _values(node))


def _size(node: Node) -> int:
    return max(map(numel, _values(node)), default=0)


def _values(node: Node) -> tuple[Tensor, ...]:
    value = node.meta.get("val")
    return tuple(v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, Tensor))


def _instructions(node: Node) -> float:
    elements: int = max(map(_size, (node, *(node.all_input_nodes if is_reduction(node) else ()))))
    return INSTRUCTIONS.get(opname(node), 1.0) * elements
