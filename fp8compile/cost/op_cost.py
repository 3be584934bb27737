"""What an operation is predicted to take on a device: a roofline, nothing measured.

    matmul, convolution, attention   max(FLOPs / rate, bytes / copy) + gap      bytes: operands and result
    reduction                        bytes of its operands / copy + gap
    pointwise                        bytes of the result / copy, where something reads it from memory; else it is fused: 0
    view, part of a tuple            0

FLOPs: a multiplication and an addition for each pair of elements; attention has two products of [queries, keys] a head, its
backward five, half of each where it is causal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

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

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm")
CONVOLUTION, ITS_BACKWARD = "convolution", "convolution_backward"


def microseconds(node: Node, rates: DeviceRates) -> float:
    """Predicted microseconds of an operation that ``is_priced``; 0 for what is no kernel of its own."""
    if contracts(node):
        return rates.microseconds(flops(node), rate_of(node, rates), _moved(node))
    if is_reduction(node):
        return _read(node) / (rates.copy * TERA) / MICRO + rates.gap
    if is_tensor(node) and is_pointwise(node) and is_read_from_memory(node):
        return nbytes(node.meta["val"]) / (rates.copy * TERA) / MICRO
    return 0.0


def step_us(graphs: Iterable[Graph], rates: DeviceRates) -> float:
    """Predicted microseconds of whole graphs: too few, since what shares no kernel is taken to do so."""
    nodes = (node for graph in graphs for node in graph.nodes if node.op == "call_function" and is_priced(node))
    return sum(microseconds(node, rates) for node in nodes)


def rate_of(node: Node, rates: DeviceRates) -> float:
    """TFLOP/s that the device reaches in a matmul, a convolution or attention; that of FP32 is slower as matmuls are."""
    if is_attention(node):
        value = _operand(node, 0).meta["val"]
        return rates.attention * rates.matmul(value.dtype.itemsize) / rates.bf16
    values = [n.meta["val"] for n in node.all_input_nodes if is_tensor(n)]
    if any(value.dtype in FP8 for value in values):
        return rates.fp8
    return rates.matmul(max(value.dtype.itemsize for value in values))


def flops(node: Node) -> float:
    """Floating-point operations of an operation that ``is_priced``: a matmul, a convolution or attention."""
    if is_attention(node):
        return flops_an_element(node) * numel(_operand(node, 0).meta["val"])
    out = node.meta["val"]
    if opname(node) == CONVOLUTION:
        return _of_convolution(_operand(node, 0).meta["val"], out, _operand(node, 1).meta["val"], node.args[6])
    if opname(node) == ITS_BACKWARD:  # the gradients of input and weight are as much work as the result
        given, x, weight = (_operand(node, i).meta["val"] for i in range(3))
        wanted: Any = node.args[10]
        return _of_convolution(x, given, weight, node.args[7]) * sum(map(bool, wanted[:2]))
    return flops_an_element(node) * numel(out)


def _of_convolution(x: Tensor, out: Tensor, weight: Tensor, transposed: object) -> float:
    return 2 * numel(x if transposed else out) * numel(weight) / size_hint(weight.shape[0])


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


def _read(node: Node) -> int:
    return sum(nbytes(n.meta["val"]) for n in node.all_input_nodes if is_tensor(n))


def _moved(node: Node) -> int:
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    return _read(node) + sum(nbytes(v) for v in results if hasattr(v, "element_size"))


def is_priced(node: Node) -> bool:
    """Whether ``microseconds`` knows an operation: of kernels that are called, those whose FLOPs are known."""
    return not contracts(node) or is_attention(node) or opname(node) in (*PRODUCTS, CONVOLUTION, ITS_BACKWARD)
