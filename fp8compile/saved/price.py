"""What storing a value as codes costs and what its bytes are worth, predicted (``Recipe.saved.max_cost``).

Cost: what kernels take more than with the value left in its dtype, V bytes, where codes and scales are C bytes.

    encode    + C, in the generated kernel that writes the value, or that reads it in the forward;
              apart, with a launch, where there is none, or where it sums rows, as norms do: groups are no rows
              - V where plain Inductor writes the value for the backward alone
    decode    C - V in each generated kernel that reads it in the backward;
              C + V apart, with a launch, where a matmul or attention reads it

Each is the difference of a kernel's predicted times with and without that (``fp8compile/cost/generated.py``): bytes that move
behind instructions cost nothing, and the other way round. An element takes ``ENCODE`` and ``DECODE`` instructions: so many
more had the kernels of BERT, ViT and Llama layers lowered for an H100; those of a ResNet-50 had ``SIDES`` more.

A value that the backward makes again instead (``of_making``) is written once more for a matmul that reads it, with a launch;
a generated kernel reads what it is made of.

Worth: the time in which these bytes could be had otherwise. A value need not be kept at all if the product that made it is
multiplied anew in the backward, which frees V bytes. With F operations for an element of it,

    worth = F elements / rate * (V - C) / V

A Llama-2-7B's linears have F = 2 * 4,096, a BERT-base's 2 * 768; attention's result 4 for each key, 2 if it is causal.

Assumed: that a product which is multiplied anew reads what is kept in any case, and that no other value of the same kernels
becomes codes. A value of which no product is known is worth nothing: it is stored where that costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.cost.device_rates import MICRO, TERA, DeviceRates
from fp8compile.cost.generated import GuessedKernel, Kernels, kernel_of, loaded, looked_at, time_of
from fp8compile.cost.op_cost import CONVOLUTION, ITS_BACKWARD, flops, flops_an_element, rate_of
from fp8compile.fx.graph import nbytes, numel, sizes_in_memory, storage_root
from fp8compile.fx.ops import (
    computed_from,
    contracts,
    is_attention,
    is_generated,
    is_pointwise,
    is_view_or_part,
    opname,
    readers,
)
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.numerics import Groupwise
from fp8compile.reporting.waterfall import UNPAID
from fp8compile.saved.rows import row_dims_of

ENCODE, DECODE = 12, 15  # lane instructions an element
SIDES = 40  # more for an encode that keeps on which side of an edge an element lies (``sides.py``)


@dataclass(frozen=True)
class Price:
    """Of one value, predicted.

    Attributes:
        us: what encoding and decoding take more than leaving it in its dtype, in microseconds; below 0 where they take less.
        worth_us: what the bytes are worth that are saved.
        saved: these bytes.
    """

    us: float
    worth_us: float
    saved: int

    def pays(self, max_cost: float) -> bool:
        """Whether to store it, at so large a share of its worth at most."""
        return self.us <= max_cost * self.worth_us

    @property
    def rate(self) -> float:
        """Microseconds a byte."""
        return self.us / max(1, self.saved)

    def reason(self, max_cost: float, device: str) -> str:
        """Why it is not stored."""
        return (
            f"{UNPAID}: {self.us:.3g} us, more than {max_cost:g} of the {self.worth_us:.3g} us in which {self.saved} bytes "
            f"of it are made again (predicted for {device})"
        )


class Prices:
    """Prices of what a graph saves, on one device.

    Args:
        split: forward and backward before anything is encoded.
        rates: of the device.
    """

    def __init__(self, split: PartitionedGraph, rates: DeviceRates) -> None:
        self.rates = rates
        self._taken = {edge.forward: edge.backward for edge in split.edges}
        self._forward = Kernels(split.fw.graph)
        self._backward = Kernels(split.bw.graph, {edge.backward for edge in split.edges})
        self._returned = {storage_root(n) for n in split.user_outputs if isinstance(n, Node)}

    def of(self, edge: SavedTensor, group_size: int, keeps_sides: bool = False) -> Price:
        """The price of storing a value as one-byte codes with a scale for each group."""
        value = edge.forward.meta["val"]
        codes = Groupwise(group_size=group_size, row_dims=row_dims_of(edge)).nbytes(sizes_in_memory(value))
        each = ENCODE + SIDES * keeps_sides
        us = self._encode_us(edge.forward, codes, each) + self._decode_us(edge.backward, codes)
        saved = nbytes(value) - codes
        return Price(us, _us_to_make(edge.forward, self.rates) / nbytes(value) * saved, saved)

    def of_making(self, edge: SavedTensor, chain: Sequence[Node]) -> Price:
        """The price of making a value again in the backward, by operations that are repeated, rather than keeping it."""
        repeated = frozenset(filter(is_generated, chain))
        made, whole = storage_root(edge.forward), nbytes(edge.forward.meta["val"])
        if not repeated:  # it is a view of what is kept
            return Price(0.0, 0.0, whole)
        us, again = 0.0, kernel_of(repeated)
        reads = {looked_at(node): nbytes(value) for node, value in loaded(repeated).items()}
        if is_generated(made):
            kernel = self._forward.around(made)
            freed = whole if self._is_for_the_backward_alone(made, kernel.nodes) else 0
            us = kernel.us(self.rates, -freed) - kernel.us(self.rates)
        reading = list(readers(edge.backward))
        if all(map(is_generated, reading)):
            for kernel in self._backward_kernels(reading):
                there = {looked_at(node) for node in loaded(kernel.nodes)}
                more = sum(size for node, size in reads.items() if self._taken.get(node, node) not in there)
                us += kernel.us(self.rates, more - whole, again.instructions) - kernel.us(self.rates)
        else:
            us += self._apart(sum(reads.values()) + whole, again.instructions)
        return Price(us, _us_to_make(edge.forward, self.rates), whole)

    def _encode_us(self, saved: Node, codes: int, each: int) -> float:
        made, value = storage_root(saved), saved.meta["val"]
        near = [n for n in (made, *readers(made)) if is_generated(n)]
        whole, instructions = nbytes(value), each * numel(value)
        if not near:
            return self._apart(whole + codes, instructions)
        kernel = self._forward.around(near[0])
        freed = nbytes(made.meta["val"]) if self._is_for_the_backward_alone(made, kernel.nodes) else 0
        if not kernel.sums_rows:
            return kernel.us(self.rates, codes - freed, instructions) - kernel.us(self.rates)
        behind = (made, *computed_from(made, parts=True)) if made in kernel.nodes else ()
        again = kernel_of(frozenset(n for n in behind if n in kernel.nodes and is_pointwise(n)))
        read = sum(map(nbytes, loaded(again.nodes).values())) or whole
        left = kernel.us(self.rates, -freed) - kernel.us(self.rates)
        return left + self._apart(read + codes, again.instructions + instructions)

    def _is_for_the_backward_alone(self, made: Node, nodes: frozenset[Node]) -> bool:
        """Whether plain Inductor writes a value to memory only because the backward reads it."""
        others = (n for n in readers(made) if n.op != "output")
        return made in nodes and made not in self._returned and all(n in nodes for n in others)

    def _decode_us(self, used: Node, codes: int) -> float:
        value, reading = used.meta["val"], list(readers(used))
        whole, instructions = nbytes(value), DECODE * numel(value)
        if not all(map(is_generated, reading)):
            return self._apart(codes + whole, instructions)
        kernels = self._backward_kernels(reading)
        return sum(each.us(self.rates, codes - whole, instructions) - each.us(self.rates) for each in kernels)

    def _backward_kernels(self, reading: Iterable[Node]) -> Collection[GuessedKernel]:
        return {kernel.nodes: kernel for kernel in map(self._backward.around, reading)}.values()

    def _apart(self, num_bytes: float, instructions: float) -> float:
        return time_of(self.rates, num_bytes, instructions) + self.rates.gap


def _us_to_make(made: Node, rates: DeviceRates) -> float:
    """Microseconds of the products that a value is computed from through generated operations; 0 where there are none."""
    elements = numel(made.meta["val"])
    return sum(_us_of(node, elements, rates) for node in _nearest(storage_root(made)))


def _nearest(root: Node) -> list[Node]:
    """What a value is computed from through pointwise operations and parts of tuples of views, and is neither."""
    behind = computed_from(root, parts=True) if _is_passed(root) else ()
    return [n for n in (root, *behind) if not _is_passed(n)]


def _is_passed(node: Node) -> bool:
    return is_pointwise(node) or is_view_or_part(node)


def _us_of(node: Node, elements: int, rates: DeviceRates) -> float:
    """Of ``elements`` of a product's result; 0 for what is none."""
    result = node.all_input_nodes[0] if node.target is private.getitem else node
    if is_attention(result) and result is not node:
        return flops_an_element(result) * elements / (rate_of(result, rates) * TERA) / MICRO
    if not contracts(node) or is_attention(node) or opname(node) == ITS_BACKWARD:
        return 0.0
    each = flops(node) / numel(node.meta["val"]) if opname(node) == CONVOLUTION else flops_an_element(node)
    return each * elements / (rate_of(node, rates) * TERA) / MICRO
