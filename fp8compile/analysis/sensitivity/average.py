"""What gradients answer to a saved value that is off by much, but unbiased: which values may have few bits.

With x + e for x, the errors of elements independent of each other and E[e] = 0 (numerics/few_bits.py), a gradient g is off
by

    LINEAR   E[g(x + e)] = g(x)     g is linear in each element of x by itself. All that is left is noise, which sums over
                                    tokens average out: a weight's gradient over B S tokens, an update over steps.
    SMOOTH   E[g(x + e)] = g(x) + g''(x) E[e**2] / 2 + ...     the noise has a mean too, of the second order in the error
    OTHER    no such argument       an edge, a pole, an exponential: the mean of what is chosen is not that of x

LINEAR are products with what does not depend on x, sums, contractions, moves, choices by a mask that x did not make,
quotients of x, the gradient, the values and the result as operands of fused attention's backward (dS = P (dO V' - rowsum(dO
O)): linear in V and in O). A product of two values that depend on x is LINEAR if one of them is a sum over many elements,
as in the backward of a norm with saved statistics, x mean(x dy): an element meets itself in one of C terms, so the mean is
off by E[e**2] / C, less than the noise by a factor sqrt(C) at least. If both depend on x element by element, as in x x, it
is SMOOTH.

SMOOTH are also bounded functions (silu, gelu, sigmoid, tanh ...) that are written without an edge. In four bits a Gaussian
group's error is 0.1 standard deviations (rms), and the second derivatives are at most 1: the mean is off by 0.005. For that
the function must not be steep: the walk that lets INT8 through at a gain of ``STEEPEST`` is asked with so much gain from
the start, so 1 is left (rms 0.10 of a standard deviation there; 0.07 for INT8 at its steepest). Two bits have a rms of 0.5:
no function stays itself.

Fused attention exponentiates its logits. Its queries and keys are SMOOTH only where a recipe names few bits for attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from torch.fx import Node

from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.fx.graph import SPLICED, computed_from_any
from fp8compile.fx.ops import is_attention
from fp8compile.fx.provenance import op_name

LINEAR_OPERANDS = ("grad_out", "grad", "value", "out")  # of fused attention's backward, by name
SMOOTH_POWERS = (2, 3)
EDGES = R.COMPARISONS | R.STEPS | R.LOGIC | R.CHOICES | R.CLAMPS | R.NON_EXPANSIVE


class Answer(Enum):
    """How a gradient depends on a saved value, from the best to the worst."""

    LINEAR = 0
    SMOOTH = 1
    OTHER = 2


def answer_to(used: Node, position: Mapping[Node, int]) -> tuple[Answer, str]:
    """How the gradients depend on ``used``, a placeholder of the backward, and the first reason why no better.

    Args:
        used: the placeholder.
        position: in the graph, of each node that something is returned from.
    """
    single = {used: True}  # what depends on it: whether element by element
    worst, why = Answer.LINEAR, ""
    for node in sorted(computed_from_any(used.users) & position.keys(), key=position.__getitem__):
        read = [n for n in node.all_input_nodes if n in single]
        if node.op == "output" or not read or R.reads_shape_only(node, read):
            continue
        found = _answer_of(node, read, single)
        if found.value > worst.value:
            worst, why = found, _reason(node, found)
        single[node] = not _sums(node) and any(single[n] for n in read)
    return worst, why


def _answer_of(node: Node, read: list[Node], single: Mapping[Node, bool]) -> Answer:
    """Of one operation, to its operands ``read``; what is not linear in a bounded function is a part of it."""
    if SPLICED in node.meta or node.target is R.getitem:
        return Answer.LINEAR
    if not R.is_as_its_class(node) or R.casts_to_integer(node):
        return Answer.OTHER
    if is_attention(node):
        return Answer.LINEAR if set(_names(node, read)) <= set(LINEAR_OPERANDS) else Answer.OTHER
    found = _by_class(node, read, single)
    if found is Answer.OTHER and R.function_of(node) and packet(node) not in EDGES:
        return Answer.SMOOTH
    return found


def _by_class(node: Node, read: list[Node], single: Mapping[Node, bool]) -> Answer:
    op = packet(node)
    if op in R.CHOICES or op is R.DIV:
        exactly = node.args[0] if op in R.CHOICES else node.args[1]
        return Answer.OTHER if exactly in read else Answer.LINEAR
    if op is R.POW:
        exponent = node.args[1]
        return Answer.LINEAR if exponent == 1 else Answer.SMOOTH if exponent in SMOOTH_POWERS else Answer.OTHER
    if op in R.PRODUCTS | R.CONTRACTIONS:
        factors = [n for n in node.args if n in read] * (2 if op in R.SQUARES else 1)
        return Answer.SMOOTH if sum(single[n] for n in factors if isinstance(n, Node)) > 1 else Answer.LINEAR
    if op in R.SETTLING:
        return Answer.SMOOTH
    return Answer.LINEAR if op in R.LINEAR else Answer.OTHER


def _sums(node: Node) -> bool:
    return packet(node) in R.SUMS | R.CONTRACTIONS or is_attention(node)


def _names(node: Node, read: list[Node]) -> Iterator[str]:
    """The names of the operands of an operator that are among ``read``."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    by_name = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return (name for name, value in by_name.items() if value in read)


def _reason(node: Node, answer: Answer) -> str:
    if answer is Answer.SMOOTH:
        function = R.function_of(node)
        of = f"a function, {function[0]}," if function else f"a function, {op_name(node)},"
        return f"{of} of it in the backward"
    return f"read in the backward by {op_name(node)}: biased"
