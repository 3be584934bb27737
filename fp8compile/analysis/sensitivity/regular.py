"""Regular values: a comparison may choose between them even if an element near its edge may go the other way.

    where(x > 0, log(x), 0)        irregular: chosen a hair too low, log(x) is -inf or NaN
    where(x > 0, gradient, 0)      regular: chosen a hair too low, one gradient more of the size of the others

A value is regular if no pole and no exponential makes it, element by element, in the backward or, through what is saved, in
the forward, unless it is proven to be finite. Sums and matmuls end the search: an infinity there is everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch.fx import Node

from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.fx.graph import is_tensor, numel


def is_regular(value: Node, made: Mapping[Node, Node], is_finite: Callable[[Node], bool]) -> bool:
    """Whether no pole or exponential makes ``value``, element by element.

    Only operands of its own size are looked at: what is smaller, a row's statistic, is the same on both sides of an edge.

    Args:
        value: a node of the backward.
        made: the forward's value behind each placeholder of the backward.
        is_finite: whether a node is proven to be.
    """
    return not any(_is_steep(node) and not is_finite(node) for node in _made_by(value, made))


def is_free_of_ties(value: Node, made: Mapping[Node, Node]) -> bool:
    """Whether no equality makes ``value``, element by element: x == amax(x) hands a gradient to the largest elements alone.

        clamp(x, -1, 1), then the gradient of its maximum    to all that were clamped; within the window none of them is, so
                                                             0. Of a code that lies a hair within, the whole gradient.

    Args:
        value: a node of the backward.
        made: the forward's value behind each placeholder of the backward.
    """
    return not any(packet(node) in R.EQUALITIES for node in _made_by(value, made))


def is_chosen(value: Node, made: Mapping[Node, Node]) -> bool:
    """Whether a largest or smallest element makes ``value``: then x >= amax(x) holds at the edge alone, and for no code of x
    beside an amax that was saved.

    Args:
        value: a node of the backward.
        made: the forward's value behind each placeholder of the backward.
    """
    return any(packet(node) in R.EXTREMA for node in _made_by(value, made, of_any_size=True))


def _made_by(value: Node, made: Mapping[Node, Node], of_any_size: bool = False) -> Iterator[Node]:
    """``value`` and what makes it element by element, in the backward or, through what is saved, in the forward; operands of
    other sizes are left out unless ``of_any_size``."""
    size, seen, waiting = numel(value.meta["val"]), {value}, [value]
    while waiting:
        node = waiting.pop()
        yield node
        passes = _is_elementwise(node) or (of_any_size and node.target is R.getitem)
        parents = [made[node]] if node in made else node.all_input_nodes if passes else []
        found = [p for p in parents if p not in seen]
        found = [p for p in found if of_any_size or (is_tensor(p) and numel(p.meta["val"]) == size)]
        seen.update(found)
        waiting += found


def _is_steep(node: Node) -> bool:
    """Whether an operation has a pole or grows without end, element by element."""
    op = packet(node)
    if R.function_of(node):
        return False
    if op is R.DIV:
        divisor = node.args[1]
        return isinstance(divisor, Node) and numel(divisor.meta["val"]) == numel(node.meta["val"])
    if op is R.POW:
        return not (R.is_number(node.args[1]) and node.args[1] >= 1)
    return op in R.POLES or op in R.EXPONENTIALS


def _is_elementwise(node: Node) -> bool:
    op = packet(node)
    known = (
        R.MOVES,
        R.JOINS,
        R.PRODUCTS,
        R.ADDITIONS,
        R.NON_EXPANSIVE,
        R.CLAMPS,
        R.SETTLING,
        R.PHASES,
        R.EXPONENTIALS,
        R.CHOICES,
    )
    return op in (R.DIV, R.POW) or op in R.POLES or any(op in each for each in known)
