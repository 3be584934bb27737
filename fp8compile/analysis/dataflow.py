"""Where the values of a forward graph come from, and in which precision the user wanted them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Set

import torch
from torch.fx import Graph, Node

from fp8compile.fx.aot import is_tangent
from fp8compile.fx.graph import is_tensor
from fp8compile.fx.ops import CASTS, SIXTEEN_BIT, is_matmul

aten = torch.ops.aten

_USER_CASTS = ("float", "to", "type", "type_as", "double")


class Source(enum.Flag):
    """What a value depends on."""

    NOTHING = 0
    PARAMETER = enum.auto()  # a parameter or buffer
    INTEGER = enum.auto()  # token ids, masks: integer or boolean inputs
    DATA = enum.auto()  # floating-point inputs, with or without gradient
    GRADIENT = enum.auto()  # the gradient of an output: what makes a value of a joint graph part of the backward


def sources(graph: Graph, parameters: Set[Node]) -> dict[Node, Source]:
    """For every node of a forward or joint graph, what it depends on; ``parameters`` are inputs, and may include buffers."""
    found: dict[Node, Source] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = _source_of_input(node, parameters)
        else:
            found[node] = _union(found[parent] for parent in node.all_input_nodes)
    return found


def is_activation(source: Source) -> bool:
    """Whether a value with these sources belongs to a batch: it comes from data, or from parameters through token ids."""
    return bool(source & Source.DATA) or (Source.PARAMETER | Source.INTEGER) in source


def _source_of_input(node: Node, parameters: Set[Node]) -> Source:
    value = node.meta.get("val")
    if node in parameters:
        return Source.PARAMETER
    if is_tangent(node):
        return Source.GRADIENT
    if not isinstance(value, torch.Tensor):
        return Source.NOTHING
    return Source.DATA if value.dtype.is_floating_point or value.dtype.is_complex else Source.INTEGER


def _union(parts: Iterable[Source]) -> Source:
    whole = Source.NOTHING
    for part in parts:
        whole |= part
    return whole


def user_fp32(graph: Graph, static: Set[Node]) -> set[Node]:
    """FP32 values of a region that the user put in FP32 inside a 16-bit model; empty where the model is not 16-bit.

    A region starts at a cast the user wrote (``.float()``; not one from autocast or a decomposition) and at a matmul in FP32
    in a model whose other matmuls are 16-bit (``autocast(enabled=False)``). It goes on through values made only from the
    region and parameters, and ends where the user casts back.
    """
    if not any(is_matmul(n) and n.meta["val"].dtype in SIXTEEN_BIT for n in graph.nodes if is_tensor(n)):
        return set()
    region: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not is_tensor(node) or node.meta["val"].dtype != torch.float32:
            continue
        inputs = [n for n in node.all_input_nodes if n not in static and is_tensor(n)]
        inside = bool(inputs) and all(n in region for n in inputs)
        if inside or is_matmul(node) or _is_user_upcast(node):
            region.add(node)
    return region


def _is_user_upcast(node: Node) -> bool:
    if node.target not in CASTS:
        return False
    source = node.args[0]
    stack = node.meta.get("source_fn_stack")
    written = stack[-1][1] if stack else None
    name = written if isinstance(written, str) else getattr(written, "__name__", "")
    return is_tensor(source) and source.meta["val"].dtype in SIXTEEN_BIT and name in _USER_CASTS  # type: ignore[union-attr]
