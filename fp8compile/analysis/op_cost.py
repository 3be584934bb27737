"""What an operation is predicted to take on a device: a roofline, nothing measured.

    matmul, convolution, attention   max(FLOPs / rate, bytes / copy) + gap      bytes: operands and result
    reduction                        bytes of its operands / copy + gap
    pointwise                        bytes of the result / copy, where something reads it from memory; else it is fused: 0
    view, part of a tuple            0

FLOPs: a multiplication and an addition for each pair of elements; attention has two products of [queries, keys] a head, half
of each where it is causal.
"""

from __future__ import annotations

import math

from torch.fx import Node

from fp8compile.analysis.liveness import is_read_from_memory
from fp8compile.fx.graph import is_tensor, nbytes, numel, size_hint
from fp8compile.fx.ops import contracts, is_attention, is_pointwise, is_reduction, opname
from fp8compile.numerics.formats import FP8
from fp8compile.planning.device_rates import DeviceRates

TERA, MICRO = 1e12, 1e-6


def microseconds(node: Node, rates: DeviceRates) -> float:
    """Predicted microseconds of one operation; 0 for what is no kernel of its own."""
    if contracts(node):
        rate = rates.attention if is_attention(node) else rates.fp8 if _takes_codes(node) else rates.bf16
        return max(flops(node) / (rate * TERA), _moved(node) / (rates.copy * TERA)) / MICRO + rates.gap
    if is_reduction(node):
        return _read(node) / (rates.copy * TERA) / MICRO + rates.gap
    if is_tensor(node) and is_pointwise(node) and is_read_from_memory(node):
        return nbytes(node.meta["val"]) / (rates.copy * TERA) / MICRO
    return 0.0


def flops(node: Node) -> float:
    """Floating-point operations of a matmul, a convolution or attention.

    Raises:
        ValueError: it is none of these.
    """
    tensors = [n.meta["val"] for n in node.all_input_nodes if is_tensor(n)]
    if is_attention(node):
        query, key = tensors[0], tensors[1]
        causal = any(arg is True for arg in node.args) or bool(node.kwargs.get("is_causal"))
        return 4 * numel(query) * size_hint(key.shape[-2]) * (0.5 if causal else 1.0)
    name, out = opname(node), node.meta["val"]
    if name == "convolution":
        weight = tensors[1]
        transposed = bool(node.args[6])
        result = tensors[0] if transposed else out
        return 2 * numel(result) * numel(weight) / size_hint(weight.shape[0])
    if name not in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        raise ValueError(f"the FLOPs of {node.target} are not known")
    first = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
    return 2 * numel(out) * size_hint(first.shape[-1])


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
    if not contracts(node):
        return True
    try:
        return math.isfinite(flops(node))
    except ValueError:
        return False
