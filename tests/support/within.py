"""What a graph of element-wise operations computes in FP32, and bounds of it for any order of roundings.

    value    as FP32 has it            low <= exact <= high    in FP64, where each argument was within its own bounds

Each operation here rises or falls in each of its arguments, so the corners of their bounds hold its exact results. An
operation that rounds then moves both bounds apart by half an ulp. A comparison is what the value says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

aten = torch.ops.aten
near = torch.ops.fp8compile
U = 2.0**-24  # half an ulp, relatively
LEAST = 2.0**-149  # FP32's smallest number
ROUND: dict[Any, Callable[..., Any]] = {
    aten.mul: torch.mul,
    aten.add: torch.add,
    aten.sub: torch.sub,
    aten.div: torch.div,
    aten.reciprocal: torch.reciprocal,
    aten.sqrt: torch.sqrt,
    near.near_sqrt: torch.sqrt,
    near.near_quotient: torch.div,
}
EXACT: dict[Any, Callable[..., Any]] = {
    aten.neg: torch.neg,
    aten.abs: torch.abs,
    aten.sign: torch.sign,
    aten.maximum: torch.maximum,
    aten.minimum: torch.minimum,
    aten.clamp: torch.clamp,
    aten._to_copy: torch.clone,
    aten.expand: torch.clone,
}
CONDITIONS = (aten.gt, aten.lt, aten.ge, aten.le, aten.eq, aten.ne, aten.logical_and)


@dataclass(frozen=True)
class Within:
    """One value: FP32's, and its bounds in FP64. Conditions have equal bounds."""

    value: Tensor
    low: Tensor
    high: Tensor

    def rounded(self, times: float = 1.0) -> Within:
        """Zero stays zero."""
        below, above = (torch.where(x == 0, 0.0, times * U * x.abs() + LEAST) for x in (self.low, self.high))
        return Within(self.value, self.low - below, self.high + above)


def exactly(x: Tensor) -> Within:
    return Within(x, x.double(), x.double())


def corners(function: Callable[..., Any], value: Tensor, *args: Any) -> Within:
    """``function`` at the ends of what its arguments may be."""
    ends = itertools.product(*((each.low, each.high) if isinstance(each, Within) else (each,) for each in args))
    found = torch.stack([function(*each).expand(value.shape) for each in ends])
    return Within(value, found.amin(0), found.amax(0))


class Bounding(Interpreter):
    """Runs a graph on ``Within``."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        value = target(*(each.value if isinstance(each, Within) else each for each in args), **kwargs)
        return self._within(target.overloadpacket, value, args)

    def _within(self, packet: Any, value: Tensor, args: Any) -> Within:
        if packet in (*CONDITIONS, aten.zeros_like, aten.ones_like):
            return exactly(value)
        if packet is aten.where:
            condition, one, other = args
            low, high = (
                torch.where(condition.value, a, b) for a, b in ((one.low, other.low), (one.high, other.high))
            )
            return Within(value, low, high)
        if packet is aten.addcmul:
            return self._product_and(args[0], args[1:], value)
        if packet in EXACT:
            return corners(EXACT[packet], value, *(args if packet is aten.clamp else args[: _count(packet)]))
        return corners(ROUND[packet], value, *args).rounded()

    @staticmethod
    def _product_and(start: Any, factors: Any, value: Tensor) -> Within:
        return corners(torch.add, value, start, corners(torch.mul, value, *factors).rounded()).rounded()


def _count(packet: Any) -> int:
    return 2 if packet in (aten.maximum, aten.minimum) else 1


def within(graph: GraphModule, *args: Within) -> list[Within]:
    found: list[Within] = Bounding(graph).run(*args)
    return found
