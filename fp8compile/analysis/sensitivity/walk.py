"""One saved value's error, followed from operation to operation through the backward graph."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping
from typing import Protocol

from torch.fx import Node

from fp8compile.analysis.ranges import Interval
from fp8compile.analysis.ranges.bounds import at_least, at_most
from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.sensitivity import foreign
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.analysis.sensitivity.error import (
    CHOOSES,
    CHOSEN,
    DIVIDED,
    EDGE,
    EXPONENTIATED,
    NORMALISED,
    PHASE,
    TIED,
    UNKNOWN,
    Error,
    Unbounded,
    Unproven,
    error_of,
    narrowest,
    reads_steps_first,
    steep,
    worst,
)
from fp8compile.fx.graph import SPLICED, is_tensor
from fp8compile.fx.ops import CONSTANTS, is_attention
from fp8compile.fx.provenance import op_name
from fp8compile.numerics import Format

STEEPEST = 8.0  # times 4 amax / 254 at most, where amax is 4 standard deviations: an eighth of a function's range
NARROW = 1.6  # the least width of a window, in standard deviations: see _of_step
SMALL = 1 / 16  # the largest error of an exponent or a phase, and of a divisor relative to its distance from the pole


class Backward(Protocol):
    """What the walk asks of the graph it goes through."""

    @property
    def position(self) -> Mapping[Node, int]: ...

    @property
    def ranges(self) -> Mapping[Node, Interval]: ...

    def is_linear_from(self, node: Node) -> bool: ...

    def is_regular(self, value: Node) -> bool: ...

    def is_free_of_ties(self, value: Node) -> bool: ...

    def is_given(self, value: Node) -> bool: ...

    def is_normalised(self, value: Node) -> bool: ...

    def is_residual_sum(self, value: Node, used: Node) -> bool: ...

    def is_of_norm(self, node: Node) -> bool: ...

    def is_gradient(self, value: Node) -> bool: ...

    def is_chosen(self, value: Node) -> bool: ...


class Walk:
    """One value's error, followed through the backward graph; ``prove`` says whether ranges may be asked for."""

    def __init__(self, of: Backward, fmt: Format, start: Error, prove: bool = False) -> None:
        self.of, self.start, self.prove = of, start, prove
        self.relative, self.e = fmt.is_float, error_of(fmt)
        self.errors: dict[Node, Error] = {}
        self.largest = start.amplification

    def follow(self, used: Node) -> float:
        """The largest amplification of any value computed from ``used``, in the order of the graph."""
        self.used, self.errors[used] = used, self.start
        waiting, seen = [(0, used)], {used}
        while waiting:
            _, node = heapq.heappop(waiting)
            if node is used or self._respond(node):
                new = {user for user in node.users if user in self.of.position} - seen
                seen |= new
                for user in new:
                    heapq.heappush(waiting, (self.of.position[user], user))
        return self.largest

    def _respond(self, node: Node) -> bool:
        """Find the error of ``node`` from those of its operands; False where it has none that must be followed."""
        read = [n for n in node.all_input_nodes if n in self.errors and self._matters(n, node)]
        if node.op == "output" or not read or packet(node) in R.SHAPE_ONLY:
            return False
        error = self._response(node, {n: self._as_read_by(node, n) for n in read})
        if self.of.is_normalised(node) and not self.of.is_residual_sum(node, self.used):
            raise Unbounded(NORMALISED)
        self.errors[node], self.largest = error, max(self.largest, error.amplification)
        return True

    def _matters(self, operand: Node, reader: Node) -> bool:
        if self.errors[operand].step or self.errors[operand].within:
            return True
        return not self.of.is_linear_from(operand) and not R.reads_shape_only(reader, [operand])

    def _as_read_by(self, reader: Node, operand: Node) -> Error:
        """The error of an operand; only a bounded function itself may read its inner values."""
        error = self.errors[operand]
        if error.within is None or error.within == R.function_of(reader):
            return error
        if any(R.function_of(user) == error.within for user in operand.users):
            raise Unbounded(EXPONENTIATED)
        return dataclasses.replace(error, within=None)

    def _response(self, node: Node, read: dict[Node, Error]) -> Error:
        op, error = packet(node), worst(list(read.values()))
        if SPLICED in node.meta or node.target is R.getitem:
            return error  # our own codecs, clips and counts: they round once more, or only observe
        if error.step and not (op in R.MOVES and reads_steps_first(node, read)):
            return self._of_step(node, read, error)
        if R.passes_on(node):
            return error
        for operations, rule in (
            (R.PRODUCTS | R.CONTRACTIONS, self._product),
            ({R.DIV}, self._quotient),
            (R.SUMS | R.ADDITIONS, self._sum),
            (R.CLAMPS, self._clamp),
            (R.SETTLING, self._settling),
            (R.EXPONENTIALS, self._exponential),
            (R.PHASES, self._phase),
            (R.POLES, self._pole),
            ({R.POW}, self._power),
            (R.COMPARISONS | R.STEPS, self._comparison),
        ):
            if op in operations and R.is_as_its_class(node):
                return rule(node, read, error)
        if is_attention(node):
            linear = all(R.takes_as_gradient(node, operand) for operand in read)
            k = error.amplification * (1 if linear else 2)
            return dataclasses.replace(error, amplification=k, absolute=math.inf, shifted=True)
        if foreign.operator_of(node) is not None:
            return foreign.response(node, read, self.of.is_gradient)
        raise Unbounded(UNKNOWN.format(op_name(node)))

    def _product(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        """(1 + k1 e)(1 + k2 e) - 1, about (k1 + k2) e. An operand that appears twice counts twice."""
        operands = [a for a in node.args if isinstance(a, Node)]
        k = max(error.amplification, sum(read[a].amplification for a in operands if a in read))
        gain = self._gain_of(node, read) if packet(node) in R.PRODUCTS else 1.0
        absolute = error.absolute * gain if len(operands) == 1 else math.inf
        shifted = error.shifted or packet(node) in R.CONTRACTIONS or R.is_complex(node)
        return dataclasses.replace(error, amplification=k, gain=error.gain * gain, absolute=absolute, shifted=shifted)

    def _gain_of(self, node: Node, read: dict[Node, Error]) -> float:
        """The gain of the exact factors of a product: constants, and tensors by their proven amax; of pairs none is claimed.

        A tensor with a number for each element may be large where x is small. So may a parameter or an argument of the
        caller's, whatever its shape. Any other tensor with fewer elements than x counts as 1: a row's statistic, a channel's
        modulation, and the weight of a norm, which scales what is normalised.
        """
        gain = math.inf if R.is_complex(node) else math.prod(abs(a) for a in node.args if R.is_number(a))
        factors = [a for a in node.args if isinstance(a, Node) and a not in read and is_tensor(a)]
        return gain * math.prod(self._amax(a) for a in factors if self._counts(a, node))

    def _counts(self, factor: Node, node: Node) -> bool:
        return R.is_as_large(factor, node) or (self.of.is_given(factor) and not self.of.is_of_norm(node))

    def _amax(self, value: Node) -> float:
        known = self.of.ranges.get(value) if self.prove else None
        return known.amax if known else math.inf

    def _quotient(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        divisor = node.args[1]
        if isinstance(divisor, Node) and divisor in read:
            self._keep_away(0.0, divisor, node)
            k = 2 * sum(read[a].amplification for a in node.args if isinstance(a, Node) and a in read)
            return dataclasses.replace(error, amplification=k, absolute=math.inf, shifted=True)
        if isinstance(divisor, Node):
            distance = self._distance(0.0, divisor) if self._counts(divisor, node) else 1.0
            if not distance and (error.shifted or not self.relative):
                raise steep(math.inf)  # a value that is small where its divisor is: x / y of x = y z
            gain = 1 / distance if distance else math.inf
            return dataclasses.replace(error, gain=error.gain * gain, absolute=math.inf)
        gain = 1 / abs(divisor) if R.is_number(divisor) and divisor else math.inf
        return dataclasses.replace(error, gain=error.gain * gain, absolute=error.absolute * gain)

    def _sum(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        if packet(node) in R.NEGATIONS:
            return error
        pointwise = packet(node) in R.ADDITIONS and not node.kwargs
        twice = 2 if len(read) == 1 else 1
        absolute = twice * sum(each.absolute for each in read.values()) if pointwise else math.inf
        return dataclasses.replace(error, absolute=absolute, shifted=True)

    def _clamp(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        """A clamp between two bounds settles; how steep it is depends on the gain relative to their distance."""
        width = R.clamped_width(node)
        if error.gain > STEEPEST * width and (error.shifted or not self.relative):
            raise steep(error.gain / width if width else math.inf)
        return error

    def _settling(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        if error.gain > STEEPEST and (error.shifted or not self.relative):
            raise steep(error.gain)
        shifted = error.shifted or packet(node) not in R.SETTLING_ODD
        return Error(error.amplification, 1.0, min(2 / self.e, 1.13 * error.absolute), shifted, within=error.within)

    def _exponential(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        if function := R.function_of(node):
            return dataclasses.replace(self._settling(node, read, error), within=function)
        if self._absolute(error) > SMALL:
            raise Unproven(EXPONENTIATED)
        return dataclasses.replace(error, amplification=max(1.0, 2 * error.absolute), absolute=math.inf, shifted=True)

    def _phase(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        if self._absolute(error) > SMALL:
            raise Unproven(PHASE.format(op_name(node)))
        return dataclasses.replace(error, amplification=max(1.0, error.absolute), gain=1.0, shifted=True)

    def _pole(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        if function := R.function_of(node):
            return dataclasses.replace(self._settling(node, read, error), within=function)
        self._keep_away(R.POLES[packet(node)], next(iter(read)), node)
        return dataclasses.replace(error, amplification=2 * error.amplification, absolute=math.inf, shifted=True)

    def _power(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        """x^n: relative error n e. Below n = 1 the power or its slope has a pole at 0; below 2, the 2nd derivative has."""
        base, exponent = node.args[0], node.args[1]
        if not isinstance(base, Node) or not R.is_number(exponent):
            raise Unbounded(UNKNOWN.format(f"{op_name(node)} with a tensor for an exponent"))
        if exponent < 1:
            self._keep_away(0.0, base, node)
        k = max(1.0, abs(exponent))
        amplified = k * error.amplification
        return dataclasses.replace(error, amplification=amplified, gain=error.gain**k, absolute=math.inf)

    def _absolute(self, error: Error) -> float:
        """The largest error of a node's operand, in its own units, as followed from the proven range of the code."""
        return error.absolute * self.e if self.prove else math.inf

    def _keep_away(self, pole: float, operand: Node, node: Node) -> None:
        """Raise unless ``operand`` is proven to stay so far from a pole that its error is small beside that distance."""
        if R.function_of(node) and self.errors[operand].within == R.function_of(node):
            return
        if not self._absolute(self.errors[operand]) <= SMALL * self._distance(pole, operand):
            raise Unproven(DIVIDED.format(op_name(node)))

    def _distance(self, pole: float, operand: Node) -> float:
        """How far a value is proven to stay away from a pole; 0 where nothing is proven."""
        known = self.of.ranges.get(operand) if self.prove else None
        return max(0.0, at_least(known.lower) - pole, pole - at_most(known.upper)) if known else 0.0

    def _comparison(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        """Signs survive a relative error. At any other edge the error is 1/16 of the edge, and too many values lie within."""
        value = next(iter(read))
        edge = R.edge_of(node, value)
        if any(map(self.of.is_chosen, node.all_input_nodes)):
            raise Unbounded(CHOSEN)
        relative = self.relative and not error.shifted
        if self.relative and edge != 0:
            raise Unbounded(EDGE.format("another tensor" if isinstance(edge, Node) else f"{abs(edge):g}"))
        if error.gain > STEEPEST and not relative and (edge != 0 or error.shifted):
            raise steep(error.gain)  # compared with 0, a value may be arbitrarily small
        edges = frozenset({(value, edge if isinstance(edge, Node) or not error.gain else edge / error.gain)})
        return dataclasses.replace(error, gain=1.0, absolute=math.inf, shifted=True, step=True, edges=edges)

    def _of_step(self, node: Node, read: dict[Node, Error], error: Error) -> Error:
        """Masks may be combined, multiplied with and chosen by, if what they choose between is regular.

        Two edges, at -c and c, are a window. An element is on the wrong side of an edge where it lies nearer to it than its
        error d. So of the elements within, the share d / 2c is wrong: 1 % (20 dB) where c is 50 d, 0.8 standard deviations
        in INT8.
        """
        op = packet(node)
        if op in R.LOGIC:
            if (width := narrowest(error.edges)) < NARROW:
                raise steep(1 / width if width else math.inf)
            return error
        others = [n for n in node.all_input_nodes if is_tensor(n) and not (n in read and read[n].step)]
        others = [n for n in others if n.target not in CONSTANTS]
        whole = R.casts_to_integer(node) and (op not in R.CHOICES or others)
        if op not in R.CHOICES | R.PRODUCTS | R.ADDITIONS | R.JOINS or whole:
            raise Unbounded(UNKNOWN.format(f"{op_name(node)} of a comparison"))
        if not R.function_of(node) and not all(map(self.of.is_regular, others)):
            raise Unbounded(CHOOSES)
        if any(edge != 0 for _, edge in error.edges) and not all(map(self.of.is_free_of_ties, others)):
            raise Unbounded(TIED)
        return dataclasses.replace(error, absolute=math.inf, shifted=True, step=not others)
