"""Codes on their value's side of an edge: what the backward compares comes out as it does for the value itself.

    y = w x^ + b;   relu'(y) = (y > 0)      q = round(z / s)            where y(z~(q)) > 0 as y(z) > 0
                                            q + 1 or q - 1, towards z   where rounding crossed the edge

INT8's step is 1/127 of the largest of a group. So of Gaussian values with an edge at their mean 0.6 % end up on the other
side, and each has a whole gradient switched on or off. That is the largest error of a network of convolutions and relu.
It does not average out where a norm has taken the mean of the gradient away. The next code towards the value lies on the
right side, since y is monotone in z and the edge lies between the value and its own code. It is off by a step at most, twice
as much as else.

Only for edges that are reached through monotone operations whose other operands are exact, the same in both graphs. Numbers
at other edges are rounded as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fp8compile.analysis.ranges.matching import CAST_PACKETS, RESHAPE_PACKETS, packet
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.fx.graph import computed_from_any, is_tensor, numel

aten = torch.ops.aten

EDGES = R.COMPARISONS | {aten.sign, aten.sgn}
AFFINE = {aten.add, aten.sub, aten.mul, aten.div}
MONOTONE = AFFINE | CAST_PACKETS | RESHAPE_PACKETS | R.CHOICES | R.CLAMPS | {aten.neg, aten.relu}


@dataclass(frozen=True)
class Sides:
    """Which side of each edge a value lies on.

    Attributes:
        value: the backward's input for it.
        nodes: of the backward, in its order, from the value to the comparisons.
        comparisons: those of ``nodes`` that are, or that take the sign.
        given: what they read besides; each node of the backward and that of the forward.
    """

    value: Node
    nodes: tuple[Node, ...]
    comparisons: tuple[Node, ...]
    given: tuple[tuple[Node, Node], ...]

    @property
    def operands(self) -> tuple[Node, ...]:
        """The forward's nodes that ``crossed`` wants."""
        return tuple(early for _, early in self.given)

    def crossed(self, x: Tensor, back: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Where a comparison has another result for what came ``back`` than for ``x``."""
        pairs = zip(self._of(x, operands), self._of(back, operands), strict=True)
        return functools.reduce(torch.logical_or, (a != b for a, b in pairs))

    def _of(self, x: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results of all comparisons for a value ``x``."""
        known = dict(zip((late for late, _ in self.given), operands, strict=True)) | {self.value: x}
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [known[node].reshape(x.shape) for node in self.comparisons]  # behind views, which keep the order


def sides_of(value: Node, made_of_others: Callable[[], Set[Node]], in_forward: Mapping[Node, Node]) -> Sides | None:
    """The edges that a saved value is compared with; None where there are none whose side can be kept.

    Args:
        value: the backward's input for it.
        made_of_others: what the backward computes from codes of other values, which is not exact. What it computes from
            this value by any other way, such as its mean, is no more so.
        in_forward: the nodes that the forward has too.
    """
    reached = _monotone_in(value, in_forward, frozenset())
    if not any(packet(node) in EDGES for node in reached):
        return None
    reached = _monotone_in(value, in_forward, made_of_others() | computed_from_any([value]))
    comparisons = [node for node in reached if packet(node) in EDGES]
    nodes = _leading_to(comparisons, reached)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n is not value and n not in reached)
    given = tuple((late, in_forward[late]) for late in read)
    return Sides(value, nodes, tuple(comparisons), given) if comparisons else None


def _monotone_in(value: Node, in_forward: Mapping[Node, Node], inexact: Set[Node]) -> dict[Node, None]:
    """What is monotone in a value, element by element, or compares it, with operands that both graphs have; in order."""
    size, found, waiting = numel(value.meta["val"]), dict[Node, None](), [value]
    while waiting:
        for node in waiting.pop(0).users:
            others = [n for n in node.all_input_nodes if n is not value and n not in found]
            fits = is_tensor(node) and node not in found and numel(node.meta["val"]) == size
            if not fits or any(n in inexact or n not in in_forward for n in others):
                continue
            if packet(node) in EDGES or _is_monotone(node, {value, *found}):
                found[node] = None
                waiting.append(node)
    return found


def _is_monotone(node: Node, reached: Set[Node]) -> bool:
    """Whether a node is monotone in the one operand that is reached, element by element."""
    if packet(node) not in MONOTONE or sum(n in reached for n in node.args if isinstance(n, Node)) != 1:
        return False
    return packet(node) is not aten.div or node.args[1] not in reached


def _leading_to(comparisons: list[Node], reached: Mapping[Node, None]) -> tuple[Node, ...]:
    """Those of ``reached`` that are needed for the comparisons, each behind what it reads."""
    wanted, waiting = set(comparisons), list(comparisons)
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n in reached and n not in wanted]
        wanted.update(new)
        waiting += new
    return tuple(node for node in reached if node in wanted)


def keep_sides(codes: Tensor, is_above: Tensor, crossed: Tensor) -> Tensor:
    """INT8 codes, each that ``crossed`` an edge one step nearer to its value.

    Args:
        codes: INT8.
        is_above: where the value is larger than what its code stands for.
        crossed: where the code lies on the other side of an edge.
    """
    step = torch.where(is_above, 1, -1).to(torch.int16)
    moved = (codes.to(torch.int16) + step).clamp(-127, 127).to(torch.int8)
    return torch.where(crossed, moved, codes)
