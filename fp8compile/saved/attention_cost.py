"""What storing an operand or the result of attention costs and is worth, predicted (``Recipe.saved.attention="auto"``).

Attention is a kernel of a library: no encode and no decode fuses into it. Bytes that move more than in 16 bit, for a value of
V bytes and C bytes of codes and scales:

    encode    C where a generated kernel writes the value, or reads it, in the forward; else V + C, and a launch
    decode    C - V where generated kernels alone read the value in the backward; else C + V, and a launch

    cost  = bytes / the memory's rate + launches * the gap between two kernels
    worth = (V - C) * price

Price of a byte: the time in which it could be had otherwise. A value need not be kept at all if the product that made it is
multiplied anew in the backward, which frees V bytes. A product of inner dimension K takes 2 K operations for an element:

    price = 2 K elements / rate of products / V               K / rate in 16 bit
    price = 4 S elements / rate of attention / V              of attention's result; S: how many keys, half of it if causal

With the rates of an H100, in 16 bit, groups of 128, and without the gaps:

    4.03 bytes an element   what rotary embeddings write            stored from K = 1,050 on
    6.03                    what a product writes                   stored from K = 1,580 on
    6.03                    attention's result                      stored from 630 keys on, 1,270 if causal

A Llama-2-7B has K = 4,096. Small values are left by the gaps: 4 us for two launches.

Assumed: that kernels wait for memory, and that a product that is multiplied anew reads what is kept in any case. A value of
which no product is known (it comes into the graph, or convolutions made it) is stored where that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.cost.device_rates import DeviceRates
from fp8compile.cost.op_cost import flops_an_element
from fp8compile.fx.graph import is_tensor, nbytes, numel, sizes_in_memory, storage_root
from fp8compile.fx.ops import (
    contracts,
    is_attention,
    is_pointwise,
    is_reduction,
    is_split,
    is_view,
    opname,
    readers,
)
from fp8compile.fx.partition import SavedTensor
from fp8compile.numerics import Groupwise
from fp8compile.saved.rows import row_dims_of

MICRO = 1e6  # microseconds in a second; a TB/s is as many bytes in one, so is a TFLOP/s operations


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

    @property
    def pays(self) -> bool:
        """Whether to store it."""
        return self.us <= max(self.worth_us, 0.0)

    def reason(self, device: str) -> str:
        """Why it is not stored."""
        return (
            f"storing it does not pay: {self.us:.3g} us to encode and decode, {self.worth_us:.3g} us is what "
            f"{self.saved} bytes are worth (predicted for {device})"
        )


def price_of(edge: SavedTensor, group_size: int, rates: DeviceRates) -> Price:
    """The price of storing a value as one-byte codes with a scale for each group."""
    value = edge.forward.meta["val"]
    codes = Groupwise(group_size=group_size, row_dims=row_dims_of(edge)).nbytes(sizes_in_memory(value))
    whole = nbytes(value)
    moved, launches = codes, 0
    if not _meets_generated_kernel(edge.forward):
        moved, launches = moved + whole, 1
    if all(map(_is_generated, readers(edge.backward))):
        moved += codes - whole
    else:
        moved, launches = moved + codes + whole, launches + 1
    saved = whole - codes
    worth = _us_to_make(edge.forward, rates) / whole * saved
    return Price(moved / (rates.copy * MICRO) + launches * rates.gap, worth, saved)


def _meets_generated_kernel(made: Node) -> bool:
    """Whether a generated kernel writes a value of the forward, or reads it there."""
    root = storage_root(made)
    return _is_generated(root) or any(map(_is_generated, readers(root)))


def _is_generated(node: Node) -> bool:
    return is_pointwise(node) or is_reduction(node)


def _us_to_make(made: Node, rates: DeviceRates) -> float:
    """Microseconds of the products that a value is computed from through generated operations; 0 where there are none."""
    elements = numel(made.meta["val"])
    return sum(_us_of(node, elements, rates) for node in _nearest(storage_root(made)))


def _nearest(root: Node) -> set[Node]:
    """What a value is computed from through generated operations and parts of tuples of views, and is neither."""
    found, seen, waiting = set[Node](), {root}, [root]
    while waiting:
        node = waiting.pop()
        split = is_split(node) or (node.target is private.getitem and is_split(node.all_input_nodes[0]))
        if not (split or is_pointwise(node) or is_view(node)):
            found.add(node)
            continue
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return found


def _attention_of(node: Node) -> bool:
    """Whether a node is a result of attention."""
    return node.target is private.getitem and is_attention(node.all_input_nodes[0])


def _us_of(node: Node, elements: int, rates: DeviceRates) -> float:
    """Of ``elements`` of a product's result; 0 for what is none."""
    if _attention_of(node):
        return flops_an_element(node.all_input_nodes[0]) * elements / (rates.attention * MICRO)
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    if not contracts(node) or is_attention(node) or "conv" in opname(node) or len(operands) < 2:
        return 0.0
    rate = rates.fp8 if opname(node) == "_scaled_mm" else rates.bf16
    return flops_an_element(node) * elements / (rate * MICRO)
