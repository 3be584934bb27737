"""How far off a value computed from a code is, and why that may be unknown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from fp8compile.numerics import Format

EXPONENTIATED = "exponentiated in the backward: a relative error would become an absolute one of the exponent"
DIVIDED = "divided by in the backward: nothing proves that it stays away from the pole of {}"
PHASE = "a phase in the backward: nothing proves that it is small enough for {}"
STEEP = "steep in the backward: a function of {}, of which what is small beside its group is rounded away"
EDGE = "compared with {} in the backward, where E4M3 is off by up to 1/16 of that"
CHOOSES = "compared in the backward, to choose between values of which one may be infinite"
TIED = "compared in the backward, to choose among what was found equal to a maximum or another value"
CHOSEN = "compared in the backward with a largest or smallest of some elements, which is at that edge itself"
UNKNOWN = "read in the backward by {}, which the sensitivity analysis does not know"
NORMALISED = "normalised in the backward, which would compute it from codes of what it is made of"
AMPLIFIED = "amplified {:.0f} times in the backward"

Edge = tuple[Node, float | Node]


class Unbounded(Exception):
    """No bound is known for the response of an operation; the message is the reason for the report."""


class Unproven(Unbounded):
    """The response is bounded if some value is; the range analysis may know that."""


@dataclass(frozen=True)
class Error:
    """How far off a value computed from a code is; see the head of this package.

    Attributes:
        amplification: k.
        gain: the product of constants between the code and the value.
        absolute: |v' - v| <= absolute * e, by proven ranges; inf where nothing is proven.
        shifted: whether something was added on the way, so that a small value may be far off relatively.
        step: whether it is a mask, or a number made from one.
        edges: for a mask, each compared value and what it is compared with: a number in units of the gain, or another tensor.
        within: the bounded function (name, seq_nr) whose inner value this is; no other operation may read it.
    """

    amplification: float = 1.0
    gain: float = 1.0
    absolute: float = math.inf
    shifted: bool = False
    step: bool = False
    edges: frozenset[Edge] = frozenset()
    within: tuple[str, object] | None = None


def worst(errors: list[Error]) -> Error:
    """An error that is no smaller than any of several."""
    return Error(
        max(e.amplification for e in errors),
        max(e.gain for e in errors),
        max(e.absolute for e in errors),
        any(e.shifted for e in errors),
        any(e.step for e in errors),
        frozenset[Edge]().union(*(e.edges for e in errors)),
        next((e.within for e in errors if e.within), None),
    )


def error_of(fmt: Format) -> float:
    """e: half a step of a format, relative to a group's largest value, or for floating point to each; the scale is BF16."""
    return (fmt.half_ulp if fmt.is_float else 0.5 / fmt.max) + 2.0**-9


def narrowest(edges: frozenset[Edge]) -> float:
    """The smallest distance of two edges of one value, in units of its gain; 0 if one is a tensor, inf for a single edge."""
    found = math.inf
    for value in {value for value, _ in edges}:
        own = [edge for of, edge in edges if of is value]
        numbers = sorted(edge for edge in own if not isinstance(edge, Node))
        if len(own) > 1 and len(numbers) < len(own):
            return 0.0
        found = min([found, *(high - low for low, high in itertools.pairwise(numbers))])
    return found


def reads_steps_first(node: Node, read: Mapping[Node, Error]) -> bool:
    """Whether the only step that is read is what a view or a copy moves, not an index."""
    return all(n is node.all_input_nodes[0] for n in read if read[n].step)


def steep(gain: float) -> Unproven:
    """The reason of a function of so many times the value."""
    # Another tensor: all that is proven of a parameter.
    of = f"{gain:g} times the value" if gain < 1e9 else "the value times another tensor"
    return Unproven(STEEP.format(of))
