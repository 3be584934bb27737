"""The specification of a rewritten graph, checked after every pass where ``verify.enabled`` (in the tests; off by default).

codes       one byte per element, made by an encode; read only through views and layout copies, by a decode, by a
            scaled matmul, or handed to the backward: never computed with as if they were numbers
scales      one inv_scale, FP32 or E8M0 (uint8), for each encoding of a matmul's operand
_scaled_mm  FP8 operands, the first row-major, the second column-major, inner sides multiples of 16, FP32 scales
_int_mm     INT8 operands, an inner side whose sums INT32 holds
metadata    every operation has its value in ``meta["val"]``
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.fx.graph import ENCODING, SPLICED, is_tensor, size_hint
from fp8compile.fx.ops import VIEWS
from fp8compile.numerics.formats import E5M2, FP8, FP8_MULTIPLE, OPERANDS
from fp8compile.numerics.integer_products import MOST_PRODUCTS

aten, prims = torch.ops.aten, torch.ops.prims

enabled = False

ONE_BYTE = (*OPERANDS, torch.uint8)


class GraphError(AssertionError):
    """A pass left a graph that breaks the specification: a defect of fp8compile, not of the model."""


def verify(graph: Graph, after: str) -> None:
    """Raise GraphError, naming the pass ``after`` which it was found, for anything that breaks the specification."""
    found = [message for node in graph.nodes for message in _problems(node)] + _unpaired(graph)
    if found:
        raise GraphError(f"after {after}: " + "; ".join(found))


def _problems(node: Node) -> list[str]:
    if node.op != "call_function" or SPLICED not in node.meta:
        return []
    if "val" not in node.meta:
        return [f"{node.name} has no meta['val']"]
    if node.target is aten._scaled_mm.default:
        return _illegal(node)
    if node.target is aten._int_mm.default:
        return _illegal_in_integers(node)
    return _undecoded_uses(node) if is_tensor(node) and _is_codes(node) else []


def _is_codes(node: Node) -> bool:
    """Spliced one-byte values are codes, or E8M0 scales, of which the same holds."""
    return node.meta["val"].dtype in ONE_BYTE


def _undecoded_uses(codes: Node) -> list[str]:
    bad = [u for u in codes.users if u.op != "output" and SPLICED not in u.meta and u.target not in VIEWS]
    return [f"codes {codes.name} are used undecoded by {user.name} = {user.target}" for user in bad]


def _unpaired(graph: Graph) -> list[str]:
    """Encodings of operands that are more than one tensor of codes and its inv_scale. Either may be in the other half, and
    the backward may compute the inv_scale again."""
    parts: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if ENCODING in node.meta and node.op == "call_function":
            parts[id(node.meta[ENCODING])].append(node)
    found = []
    for nodes in parts.values():
        scales = [n for n in nodes if n.meta["val"].dtype in (torch.float32, torch.uint8)]
        codes = [n for n in nodes if n.meta["val"].dtype in OPERANDS]
        if len(codes) > 1 or len(scales) + len(codes) != len(nodes):
            names = ", ".join(f"{n.name} ({n.meta['val'].dtype})" for n in nodes)
            found.append(f"an encoding is not one tensor of codes and its inv_scale: {names}")
    return found


def _illegal(node: Node) -> list[str]:
    left, right, inv_left, inv_right = (n.meta["val"] for n in node.args[:4])  # type: ignore[union-attr]
    checks = {
        "its operands are not FP8": left.dtype in FP8 and right.dtype in FP8,
        "both its operands are E5M2": not left.dtype == right.dtype == E5M2.dtype,
        "its first operand is not row-major": _contiguous_along(left, 1),
        "its second operand is not column-major": _contiguous_along(right, 0),
        "its inner side is not a multiple of 16": size_hint(left.shape[1]) % FP8_MULTIPLE == 0,
        "its last side is not a multiple of 16": size_hint(right.shape[1]) % FP8_MULTIPLE == 0,
        "its scales are not FP32": inv_left.dtype == inv_right.dtype == torch.float32,
    }
    return [f"{node.name}: {what}" for what, holds in checks.items() if not holds]


def _illegal_in_integers(node: Node) -> list[str]:
    left, right = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    checks = {
        "its operands are not INT8": left.dtype == right.dtype == torch.int8,
        "INT32 does not hold its sums": statically_known_true(left.shape[1] <= MOST_PRODUCTS),
    }
    return [f"{node.name}: {what}" for what, holds in checks.items() if not holds]


def _contiguous_along(value: Tensor, dim: int) -> bool:
    sides, strides = [size_hint(s) for s in value.shape], [size_hint(s) for s in value.stride()]
    return strides[dim] == 1 and (strides[1 - dim] == sides[dim] or sides[1 - dim] == 1)
