"""What a linear is predicted to cost in its dtype and in FP8: a roofline, and what encodings add to a layer's kernels.

    matmul    max(2 M K N / rate, bytes / copy) + gap                bytes: operands in 2 or 1, the result in 2; FP32 in 4
    encoding  elements * bytes an element / copy + launches * gap    three quarters of it for one matmul that is there of two

An operand is encoded for the two matmuls that read it: the input for forward and wgrad, the weight for forward and dgrad, the
gradient for dgrad and wgrad. Where only one of them is in FP8, of two that are there, codes are written once and not twice,
but the value is kept in 16 bit beside them. Lowered, q, k and v of a ViT with the forward alone in FP8 add two thirds of what
all three matmuls add, and save a third. So one matmul pays an encoding as two do.

What that adds to a layer's generated kernels is predicted from their machine code, bytes and instructions, for Llama, BERT
and ViT with 16,384 tokens (benchmarks/results/layer-instructions-sm90-lowered.json, from which tests/cost/test_linear_cost.py
takes ``ADDED`` again). A byte here is the time in which one is copied: an instruction that a kernel waits for counts as well.
Layers differ: they add 2.9 to 4.4 bytes an element of input or gradient with dynamic scales, 2.2 to 6.7 with delayed ones,
which move next to none and compute as much. Nothing is made again to save memory there: that is ``saved/allowance.py``'s
account.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fp8compile.cost.device_rates import DeviceRates
from fp8compile.fx.ops import DGRAD, FORWARD, WGRAD

ACTIVATION, WEIGHT = "activation", "weight"  # an activation: an input or a gradient


class Added(NamedTuple):
    """What an operand's encoding adds to a step: the time of so many copied bytes an element, and launches a value."""

    nbytes: float
    launches: float


ADDED: Mapping[tuple[str, str], Added] = {  # by where scales come from
    ("dynamic", ACTIVATION): Added(3.6, 3.2),
    ("dynamic", WEIGHT): Added(8.0, 2.3),
    ("delayed", ACTIVATION): Added(4.8, 1.2),
    ("delayed", WEIGHT): Added(9.2, 2.6),
    ("cached", WEIGHT): Added(6.0, 2.0),  # by its own kernels, once a step
}
READ_BY: Mapping[str, tuple[str, str]] = {
    "input": (FORWARD, WGRAD),
    "weight": (FORWARD, DGRAD),
    "gradient": (DGRAD, WGRAD),
}


ONE_ORDER = 0.75  # of what an encoding takes, where no matmul reads it transposed: three bytes are moved of four
LEAST_GAIN = 0.02  # of a linear's time: what saves less rounds for next to nothing


@dataclass(frozen=True)
class LinearShape:
    """A linear ``[M, K] x [K, N]``.

    Attributes:
        directions: which of its three matmuls are there.
        sharing: how many linears read its input; they share its codes.
        scales: "dynamic" or "delayed".
        cached: whether the weight's codes come in with the inputs.
        itemsize: bytes of an element of its dtype.
    """

    M: int
    K: int
    N: int
    directions: tuple[str, ...] = (FORWARD, DGRAD, WGRAD)
    sharing: int = 1
    scales: str = "dynamic"
    cached: bool = False
    itemsize: int = 2

    @property
    def elements(self) -> Mapping[str, int]:
        """Of its operands, by name; the result is as large as its gradient."""
        return {"input": self.M * self.K, "weight": self.K * self.N, "gradient": self.M * self.N}


class Predicted(NamedTuple):
    """Which matmuls of a linear cost least in FP8, and microseconds of all its matmuls, encodings included."""

    directions: tuple[str, ...]
    us: float
    us_in_its_dtype: float
    us_in_fp8: float  # with every one of them in FP8


def predicted(linear: LinearShape, rates: DeviceRates) -> Predicted:
    """The choice of FP8 matmuls that costs least: all eight are compared. None where that saves under ``LEAST_GAIN``."""
    there = linear.directions
    choices = [chosen for n in range(len(there) + 1) for chosen in itertools.combinations(there, n)]
    costs = {chosen: microseconds(linear, chosen, rates) for chosen in choices}
    best = min(choices, key=costs.__getitem__)
    if costs[best] > (1 - LEAST_GAIN) * costs[()]:
        best = ()
    return Predicted(best, costs[best], costs[()], costs[there])


def microseconds(linear: LinearShape, in_fp8: Collection[str], rates: DeviceRates) -> float:
    """Of all matmuls of a linear, those named in FP8, with what their operands' encodings add."""
    return sum(share_us(linear, direction, in_fp8, rates) for direction in linear.directions)


def share_us(linear: LinearShape, direction: str, in_fp8: Collection[str], rates: DeviceRates) -> float:
    """One matmul, with its part of what the encodings of its two operands add: all of it, or half where the other matmul that
    reads the operand is in FP8 too."""
    operands = [operand for operand, readers in READ_BY.items() if direction in readers and direction in in_fp8]
    added = sum(encoding_us(linear, each, rates) / len(set(READ_BY[each]) & set(in_fp8)) for each in operands)
    return matmul_us(linear, direction, direction in in_fp8, rates) + added


def matmul_us(linear: LinearShape, direction: str, in_fp8: bool, rates: DeviceRates) -> float:
    """Each of the three has two of three matrices as operands, and the third's size as its result."""
    itemsize = linear.itemsize
    rate, width = (rates.fp8, 1) if in_fp8 else (rates.matmul(itemsize), itemsize)
    moved = sum(n * (width if direction in READ_BY[name] else itemsize) for name, n in linear.elements.items())
    return max(2 * linear.M * linear.K * linear.N / rate, moved / rates.copy) * 1e-6 + rates.gap


def encoding_us(linear: LinearShape, operand: str, rates: DeviceRates) -> float:
    """What this linear's part of an operand's encoding adds, for the matmuls there are: both that read it, or one."""
    scales = "cached" if operand == "weight" and linear.cached else linear.scales
    added = ADDED[scales, WEIGHT if operand == "weight" else ACTIVATION]
    nbytes = added.nbytes * linear.itemsize / 2  # counted in BF16
    whole = linear.elements[operand] * nbytes / rates.copy * 1e-6 + added.launches * rates.gap
    whole *= 1.0 if set(READ_BY[operand]) <= set(linear.directions) else ONE_ORDER
    return whole / (linear.sharing if operand == "input" else 1)
