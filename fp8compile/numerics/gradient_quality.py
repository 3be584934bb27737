"""How far gradients are from the exact ones, and for which of them that distance has a meaning.

    SQNR(p)    20 log10(|g| / |g - g'|) in dB       g the exact step's gradient of p, g' the encoded step's
    floor(p)   the same with g' from the exact step once more, every parameter moved by one unit in the last place at
               random: the lowest of NUDGES tries

    fails      floor(p) >= bar:   SQNR(p) < bar
               floor(p) <  bar:   |g - g'| > 10**(-bar/20) |G|, G the exact gradients of all parameters
               g' holds NaN or inf where g does not

The exact step runs in the model's own dtypes, and is rounded as they are. An operation of unit roundoff u gives what it would
give exactly for operands with a relative error of up to u. So moving each parameter by one last place (2 u, of the coarsest
dtype that the graph computes in) has the effect that the rounding of the operations that read it has already. A gradient that
then changes by more than the bar allows is not *determined* to the bar in these dtypes, with or without encoding: it is what
rounding left of a sum that cancels. The gradients of the bias before a batch norm and the key's bias in attention are such:
exactly zero, and never zero in floating point. Their own norm is no measure for an error, but the norm of the step is: an
error below the bar of all gradients together moves the step no further than errors accepted elsewhere. The same holds for a
gradient that is exactly zero.

No float64 model is run: that would blame the encoding for the dtype's rounding. Norms are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.metrics import decibels, power

Gradients = Mapping[str, Tensor | None]

BAR = 10.0  # dB: an error of 0.32 of the gradient's norm
NUDGES = 3  # by chance one element may hardly move: with pure noise, one try in five stays above 10 dB


@dataclass(frozen=True)
class GradientJudge:
    """What the exact step says: for each gradient its power, its floor, and the power of the error that is allowed."""

    powers: Mapping[str, float]
    floors: Mapping[str, float]
    allowed: Mapping[str, float]

    @classmethod
    def of(cls, exact: Gradients, nudged: Iterable[Gradients], bar: float, *apart: Set[str]) -> GradientJudge:
        """From the exact gradients and those of nudged steps.

        The names in a set of ``apart``, arguments or outputs, do not count in the step's norm, but in one of their own.
        """
        powers = {name: power(g) for name, g in exact.items() if g is not None}
        floors = {name: math.inf if power else -math.inf for name, power in powers.items()}
        for again in nudged:
            errors = error_powers(exact, again)
            floors = {name: min(floor, decibels(powers[name], errors[name])) for name, floor in floors.items()}
        share = 10.0 ** (-bar / 10)
        kinds = {name: next((i for i, names in enumerate(apart) if name in names), -1) for name in powers}
        sums = dict.fromkeys(kinds.values(), 0.0)
        for name, p in powers.items():
            sums[kinds[name]] += p if p < math.inf else 0.0
        allowed = {name: share * (p if floors[name] >= bar else sums[kinds[name]]) for name, p in powers.items()}
        return cls(powers, floors, allowed)

    def determined(self, name: str, bar: float) -> bool:
        """Whether the exact step's rounding leaves this gradient above the bar."""
        return self.floors[name] >= bar

    def failing(self, errors: Mapping[str, float]) -> list[str]:
        """The gradients whose errors are too large; those that are not finite in the exact step itself are left out."""
        return [n for n, error in errors.items() if error > self.allowed[n] and self.powers[n] < math.inf]

    def sqnr(self, name: str, error: float) -> float:
        """The SQNR of a gradient with this error, in dB."""
        return decibels(self.powers[name], error)


def error_powers(exact: Gradients, other: Gradients) -> dict[str, float]:
    """|g - g'|^2 of every gradient that the exact step has; inf where g' is not finite. A missing g' counts as zero."""
    errors = {}
    for name, reference in exact.items():
        if reference is not None:
            got = other.get(name)
            errors[name] = power(reference if got is None else reference.double() - got.double())
    return errors


def nudged(value: Tensor, step: float, generator: torch.Generator) -> Tensor:
    """``value * (1 +- step)``, the sign of each element by chance; the gradient passes through unchanged."""
    still = value.detach()
    up = torch.empty_like(still).bernoulli_(0.5, generator=generator)
    return value + still * ((2 * up - 1) * step)


def last_place(dtypes: Iterable[torch.dtype]) -> float:
    """One unit in the last place of 1, in the coarsest of the floating-point dtypes that are computed in."""
    computed = [d for d in dtypes if d.is_floating_point and d.itemsize > 1]
    return max((torch.finfo(d).eps for d in computed), default=torch.finfo(torch.float32).eps)
