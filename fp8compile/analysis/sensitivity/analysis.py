"""The judgement of saved values, one at a time: see the head of this package."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from functools import cached_property

from torch.fx import Graph, Node

from fp8compile.analysis.frozen_norms import all_norms_of
from fp8compile.analysis.linears import uncast
from fp8compile.analysis.norms import Norm, itself
from fp8compile.analysis.ranges import Interval, ranges
from fp8compile.analysis.ranges.interval import ANYTHING
from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.recomputed import recomputed
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.analysis.sensitivity.average import Answer, answer_to
from fp8compile.analysis.sensitivity.declared import LINEAR
from fp8compile.analysis.sensitivity.error import AMPLIFIED, Error, Unbounded, Unproven, error_of
from fp8compile.analysis.sensitivity.foreign import answer, operator_of
from fp8compile.analysis.sensitivity.regular import is_chosen, is_free_of_ties, is_regular
from fp8compile.analysis.sensitivity.residual import is_residual_sum
from fp8compile.analysis.sensitivity.walk import STEEPEST, Walk
from fp8compile.analysis.statistics import is_statistic
from fp8compile.fx.aot import computed_from_gradients
from fp8compile.fx.graph import SPLICED, behind, is_tensor
from fp8compile.fx.ops import is_attention
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.numerics import Format

LARGEST_ERROR = 0.5  # a bound k e above this says nothing
OF_A_CODE = Error(absolute=1.0)  # a share of the largest of its group, or of the value itself
RESCALED = 2.2  # (1/16 + 1/16) / (1 - 1/16), in units of E4M3's error: fp8compile/numerics/unit_sums.py


class Sensitivity:
    """Judges the saved values of one partitioned graph, which must not change meanwhile."""

    def __init__(self, split: PartitionedGraph) -> None:
        self.split = split
        read = behind([split.bw.graph.output_node()])
        self.position: Mapping[Node, int] = {n: i for i, n in enumerate(split.bw.graph.nodes) if n in read}
        self._gradients = computed_from_gradients(split.bw.graph)
        self._linear = _linear_from(split.bw.graph, self._normalised, self._gradients)

    def reason_to_stay_exact(self, used: Node, fmt: Format, error: Error = OF_A_CODE) -> str | None:
        """Why ``used``, a placeholder of the backward, must not be a code of this format; None where it may be."""
        try:
            self.amplification(used, fmt, error)
        except Unbounded as reason:
            return str(reason)
        return None

    def amplification(self, used: Node, fmt: Format, error: Error = OF_A_CODE) -> float:
        """The largest k of a value computed from ``used``, up to where everything is linear in it.

        Args:
            used: the backward's input for a saved value.
            fmt: of its codes.
            error: of them, ``absolute`` in units of the largest that is proven of the value.

        Raises:
            Unbounded: there is a way to a gradient whose response has no known bound.
        """
        try:
            largest = Walk(self, fmt, dataclasses.replace(error, absolute=math.inf)).follow(used)
        except Unproven:
            of_used = self.ranges.get(used)
            absolute = math.inf if of_used is None or error.absolute == math.inf else of_used.amax * error.absolute
            largest = Walk(self, fmt, dataclasses.replace(error, absolute=absolute), prove=True).follow(used)
        if largest * error_of(fmt) > LARGEST_ERROR:
            raise Unbounded(AMPLIFIED.format(largest))
        return largest

    def needs_no_range(self, used: Node, fmt: Format) -> bool:
        """Whether the gradients answer an error that is ``RESCALED`` times a code's with a small one, by classes alone.

        That is: no pole, exponential or phase is read whose operand's size, or distance, had to be proven in numbers. What a
        row of codes is multiplied with, to restore what was known of it, is no error of a single element.
        """
        return self._is_small_still(used, fmt, Error(amplification=RESCALED))

    def answer_on_average(self, used: Node) -> tuple[Answer, str]:
        """How the gradients depend on a saved value that is unbiased, and why no better (average.py)."""
        return answer_to(used, self.position)

    def is_gentle(self, used: Node, fmt: Format) -> bool:
        """Whether the gradients answer this format's errors with small ones though a gain of ``STEEPEST`` came before."""
        return self._is_small_still(used, fmt, Error(gain=STEEPEST))

    def _is_small_still(self, used: Node, fmt: Format, error: Error) -> bool:
        """Whether the gradients answer with small errors where ``used`` has this one, by classes alone."""
        try:
            largest = Walk(self, fmt, error).follow(used)
        except Unbounded:
            return False
        return largest * error_of(fmt) <= LARGEST_ERROR

    @cached_property
    def norms(self) -> Mapping[Node, Norm]:
        """How values of the forward are normalised there."""
        return all_norms_of(self.split.fw.graph)

    @cached_property
    def recomputed(self) -> Mapping[Node, Node]:
        """Values of the backward that the forward computes too, and those of the forward."""
        return recomputed(self.split)

    @cached_property
    def _normalised(self) -> frozenset[Node]:
        """Values that the backward computes again and the forward normalises."""
        return frozenset(late for late, early in self.recomputed.items() if early in self.norms)

    def is_normalised(self, value: Node) -> bool:
        """Whether a value that the backward computes is one that the forward normalises."""
        return value in self._normalised

    def is_residual_sum(self, value: Node, used: Node) -> bool:
        """Whether a value of the backward is a saved one plus functions of its norm."""
        return is_residual_sum(value, used, self._is_made_by_norm)

    def _is_made_by_norm(self, node: Node) -> bool:
        """Whether a node multiplies what the forward normalises with the scale of that norm, or divides it by it."""
        if packet(node) not in (R.MUL, R.DIV):
            return False
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        for value in map(uncast, operands):
            centred = uncast(value.all_input_nodes[0]) if packet(value) is R.SUB else value
            norm = self.norms.get(self._early(centred)) or self.norms.get(self._early(value))
            if norm is not None and any(norm.scale is self._early(n) for n in operands):
                return True
        return False

    def is_of_norm(self, node: Node) -> bool:
        """Whether a node is part of a norm of torch's, or multiplies what one by hand made: a value that the forward
        normalises, times a statistic."""
        if R.is_of_norm(node):
            return True
        for made in map(uncast, node.all_input_nodes):
            if packet(made) in (R.MUL, R.DIV) and any(self._is_statistic(n) for n in made.all_input_nodes):
                large = [itself(n) for n in made.all_input_nodes if R.is_as_large(n, made)]
                return any(self._early(n) in self.norms for n in large)
        return False

    def _is_statistic(self, value: Node) -> bool:
        return is_tensor(value) and is_statistic(uncast(self._early(value)))

    def _early(self, value: Node) -> Node:
        """The forward's node for a value of the backward, where it has it too, behind casts and views."""
        found = self.recomputed.get(value, self.made.get(value))
        return itself(found) if found is not None else value

    def is_gradient(self, value: Node) -> bool:
        """Whether a value of the backward is computed from gradients."""
        return value in self._gradients

    def is_linear_from(self, node: Node) -> bool:
        """Whether all that is computed from ``node`` is linear in it, so that nothing can be found from here on."""
        return self._linear[node]

    @cached_property
    def ranges(self) -> Mapping[Node, Interval]:
        """What is proven of every value of the backward; for saved values, what is proven in the forward."""
        known = {
            e.backward: self.forward_ranges[e.forward] for e in self.split.edges if e.forward in self.forward_ranges
        }
        return ranges(self.split.bw.graph, known)

    @cached_property
    def forward_ranges(self) -> Mapping[Node, Interval]:
        return ranges(self.split.fw.graph)

    @cached_property
    def made(self) -> Mapping[Node, Node]:
        """The forward's value behind each placeholder of the backward that stands for a saved one."""
        return {e.backward: e.forward for e in self.split.edges}

    def is_given(self, value: Node) -> bool:
        """Whether a value of the backward is an input of the forward, a parameter or the caller's data, through views."""
        root = uncast(value)
        return root in self.made and uncast(self.made[root]).op == "placeholder"

    def is_regular(self, value: Node) -> bool:
        """Whether no pole or exponential makes ``value``, element by element, here or in the forward (regular.py)."""
        return is_regular(value, self.made, lambda node: self._range_of(node).amax < math.inf)

    def is_free_of_ties(self, value: Node) -> bool:
        """Whether no equality makes ``value``, element by element, here or in the forward (regular.py)."""
        return is_free_of_ties(value, self.made)

    def is_chosen(self, value: Node) -> bool:
        """Whether a largest or smallest element is in ``value``, here or in the forward (regular.py)."""
        return is_chosen(value, self.made)

    def _range_of(self, node: Node) -> Interval:
        known = self.ranges if node in self.position else self.forward_ranges
        return known.get(node, ANYTHING)


def _linear_from(graph: Graph, normalised: Set[Node], gradients: Set[Node]) -> dict[Node, bool]:
    """For every node, whether all that is computed from it is linear in it, and none of that is normalised."""
    linear: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        linear[node] = all(
            linear[user] and user not in normalised and _is_linear_in(user, node, node in gradients)
            for user in node.users
        )
    return linear


def _is_linear_in(user: Node, operand: Node, is_gradient: bool) -> bool:
    op = packet(user)
    if user.op == "output" or SPLICED in user.meta or op in R.SHAPE_ONLY or user.target is R.getitem:
        return True
    if op is R.DIV:
        divisor = user.args[1]
        return divisor is not operand and not (isinstance(divisor, Node) and R.is_as_large(divisor, user))
    if op in R.CHOICES:
        return user.args[0] is not operand
    if is_attention(user):
        return R.takes_as_gradient(user, operand)
    if operator_of(user) is not None:
        return answer(user, operand, is_gradient) == (LINEAR, 1)
    return op in R.LINEAR and R.is_as_its_class(user) and not R.casts_to_integer(user)
