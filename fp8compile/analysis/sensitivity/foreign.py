"""Which nodes of a graph call operators that are not torch's, and how these answer to a rounded operand (``declared.py``)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fp8compile.analysis.sensitivity.declared import (
    EXACT,
    LINEAR,
    SMOOTH,
    TORCHS_OWN,
    Declaration,
    declaration_of,
    name_of,
)
from fp8compile.analysis.sensitivity.error import UNKNOWN, Error, Unbounded, worst
from fp8compile.fx.aot import computed_from_gradients
from fp8compile.fx.graph import is_tensor
from fp8compile.fx.ops import arguments_of
from fp8compile.fx.provenance import op_name

# An operator that writes to its operands, as a graph has it: these go in together, and come out as results.
WRITING = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
WRITTEN = "_all_bases"


def operator_of(node: Node) -> OpOverload | None:
    """The operator that is not torch's own which a node calls, also where it writes to operands; None for all others."""
    target = node.args[0] if node.target in WRITING else node.target
    return target if isinstance(target, OpOverload) and target.namespace not in TORCHS_OWN else None


def higher_order_use(value: Node) -> str | None:
    """Why a value that a higher-order operator reads stays as it is; None where none does."""
    for user in value.users:
        if isinstance(user.target, torch._ops.HigherOrderOperator) and operator_of(user) is None:
            return f"operand of the higher-order operator {user.target}"
    return None


def answer(node: Node, operand: Node, is_gradient: bool) -> tuple[str, int]:
    """How a node that calls such an operator answers to an operand, and as how many of its arguments that is given."""
    found = list(_declared_arguments(node, operand))
    how = {known or (LINEAR if is_gradient and name != WRITTEN else EXACT) for name, known in found}
    return next(each for each in (EXACT, SMOOTH, LINEAR) if each in how), len(found)


def response(node: Node, read: Mapping[Node, Error], is_gradient: Callable[[Node], bool]) -> Error:
    """The error of what such an operator computes: the relative errors that it passes on, once or twice each.

    Raises:
        Unbounded: it reads an operand of which nothing is known.
    """
    k = 0.0
    for operand, error in read.items():
        how, times = answer(node, operand, is_gradient(operand))
        if how == EXACT:
            raise Unbounded(f"{UNKNOWN.format(op_name(node))}; {how_to_declare(node, is_gradient)}")
        k += error.amplification * times * (2 if how == SMOOTH else 1)
    return dataclasses.replace(worst(list(read.values())), amplification=k, absolute=math.inf, shifted=True)


def assumed(graph: Graph) -> list[str]:
    """The operators of a backward that are taken to be linear in their gradients, since nothing is declared of them."""
    foreign = {node: op for node in graph.nodes if (op := operator_of(node)) is not None}
    gradients = computed_from_gradients(graph) if foreign else set()
    found = set()
    for node, op in foreign.items():
        read = [n for n in node.all_input_nodes if n in gradients and is_tensor(n)]
        if any(known is None for n in read for _, known in _declared_arguments(node, n)):
            found.add(name_of(op))
    return sorted(found)


def how_to_declare(node: Node, is_gradient: Callable[[Node], bool]) -> str:
    """The line to write for the operands of a node of which nothing is declared."""
    op = operator_of(node)
    assert op is not None
    names = [argument.name for argument in op._schema.arguments]
    values = [
        n for n in node.all_input_nodes if is_tensor(n) and n.meta["val"].is_floating_point() and not is_gradient(n)
    ]
    at = sorted(
        {
            names.index(name)
            for n in values
            for name, known in _declared_arguments(node, n)
            if name in names and not known
        }
    )
    given = ", ".join(map(str, at)) + ("," if len(at) == 1 else "")
    return f"fp8compile.declare({name_of(op)!r}, smooth=({given})) if it answers small errors with small ones"


def _declared_arguments(node: Node, operand: Node) -> Iterator[tuple[str, str | None]]:
    """The arguments as which an operand is given, once for each time, and what is declared of each."""
    op = operator_of(node)
    assert op is not None
    known = declaration_of(op) or Declaration()
    given = arguments_of(node) if node.target is op else node.kwargs
    for name, value in given.items():
        held: list[Node] = []
        map_arg(value, held.append)
        yield from ((name, known.of(name)) for each in held if each is operand)
