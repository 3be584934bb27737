"""What an operation is predicted to take on a device: a roofline, nothing measured.

    matmul, convolution, attention   max(FLOPs / rate, bytes / copy) + gap      bytes: operands and result
    reduction                        bytes of its operands / copy + gap
    pointwise                        bytes of the result / copy, where something reads it from memory; else it is fused: 0
    view, part of a tuple            0

FLOPs: a multiplication and an addition for each pair of elements; attention has two products of [queries, keys] a head, its
backward five, half of each where it is causal.
"""

from __future__ import annotations

from torch.fx import Node

from fp8compile.cost.device_rates import MICRO, TERA, DeviceRates
from fp8compile.fx.graph import is_tensor, nbytes, numel, size_hint
from fp8compile.fx.ops import (
    argument_of,
    contracts,
    is_attention,
    is_pointwise,
    is_read_from_memory,
    is_reduction,
    opname,
)
from fp8compile.numerics.formats import FP8

PRODUCTS, CONVOLUTION = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm"), "convolution"


def microseconds(node: Node, rates: DeviceRates) -> float:
    """Predicted microseconds of an operation that ``is_priced``; 0 for what is no kernel of its own."""
    if contracts(node):
        rate = rates.attention if is_attention(node) else rates.fp8 if _takes_codes(node) else rates.bf16
        return rates.microseconds(flops(node), rate, _moved(node))
    if is_reduction(node):
        return _read(node) / (rates.copy * TERA) / MICRO + rates.gap
    if is_tensor(node) and is_pointwise(node) and is_read_from_memory(node):
        return nbytes(node.meta["val"]) / (rates.copy * TERA) / MICRO
    return 0.0


def flops(node: Node) -> float:
    """Floating-point operations of an operation that ``is_priced``: a matmul, a convolution or attention."""
    if is_attention(node):
        return flops_an_element(node) * numel(_operand(node, 0).meta["val"])
    out = node.meta["val"]
    if opname(node) == CONVOLUTION:
        x, weight = (_operand(node, i).meta["val"] for i in range(2))
        return 2 * numel(x if node.args[6] else out) * numel(weight) / size_hint(weight.shape[0])  # transposed: of x
    return flops_an_element(node) * numel(out)


def flops_an_element(node: Node) -> float:
    """Floating-point operations for an element of a matmul's result, or of the queries of attention."""
    if is_attention(node):
        is_backward = opname(node).endswith("_backward")  # whose first operand is the result's gradient
        keys = size_hint(_operand(node, 2 if is_backward else 1).meta["val"].shape[-2])
        return (10 if is_backward else 4) * keys * (0.5 if argument_of(node, "is_causal", False) else 1.0)
    left = _operand(node, 1 if opname(node) in ("addmm", "baddbmm") else 0)
    return 2 * size_hint(left.meta["val"].shape[-1])


def _operand(node: Node, at: int) -> Node:
    """By place, since one value may be several operands: queries and keys, for example."""
    found = node.args[at]
    assert isinstance(found, Node)
    return found


def _takes_codes(node: Node) -> bool:
    return any(is_tensor(n) and n.meta["val"].dtype in FP8 for n in node.all_input_nodes)


def _read(node: Node) -> int:
    return sum(nbytes(n.meta["val"]) for n in node.all_input_nodes if is_tensor(n))


def _moved(node: Node) -> int:
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    return _read(node) + sum(nbytes(v) for v in results if hasattr(v, "element_size"))


def is_priced(node: Node) -> bool:
    """Whether ``microseconds`` knows an operation: of kernels that are called, those whose FLOPs are known."""
    return not contracts(node) or is_attention(node) or opname(node) in (*PRODUCTS, CONVOLUTION)
