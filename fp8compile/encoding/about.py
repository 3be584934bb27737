"""About which statistics a value that is normalised is stored: those that are not one number over each of its groups.

    RMSNorm, x / |x|       over a row: nothing, the groups of a row have their own scales
    LayerNorm, GroupNorm, InstanceNorm, BatchNorm of planes        about the mean, where a group lies within the statistic's elements
    BatchNorm of rows or of channels-last planes                    about the mean and the deviation of each channel

See fp8compile/analysis/norms.py and fp8compile/numerics/deviations.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from fp8compile.analysis.norms import Norm
from fp8compile.analysis.sensitivity.error import Unbounded
from fp8compile.fx.graph import memory_order
from fp8compile.numerics.deviations import deviation, from_deviation

UNKNOWN_NORM = "normalised in a way that is not known: nothing bounds its error beside its deviation"
ABOUT_MEAN, ABOUT_BOTH, OF_SIZE = "from its mean", "from its mean, in deviations", "in units of its size"


@dataclass(frozen=True)
class About:
    """The statistics that a value is stored about: nodes of the forward.

    Attributes:
        mean, scale, divides, seen_as: see ``Norm``; ``mean`` and ``scale`` are None where the value is not stored about them.
    """

    mean: Node | None
    scale: Node | None
    divides: bool
    seen_as: tuple[int, ...]

    @property
    def statistics(self) -> tuple[Node, ...]:
        return tuple(node for node in (self.mean, self.scale) if node is not None)

    @property
    def name(self) -> str:
        return OF_SIZE if self.mean is None else ABOUT_MEAN if self.scale is None else ABOUT_BOTH

    def deviation(self, x: Tensor, statistics: Sequence[Tensor]) -> Tensor:
        """FP32, in ``x``'s shape; ``statistics`` in the order of the property."""
        return deviation(x.reshape(self.seen_as), *self._in_order(statistics)).reshape(x.shape)

    def value(self, z: Tensor, statistics: Sequence[Tensor]) -> Tensor:
        return from_deviation(z.reshape(self.seen_as), *self._in_order(statistics)).reshape(z.shape)

    def _in_order(self, statistics: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, bool]:
        given = iter(statistics)
        mean = None if self.mean is None else next(given)
        return mean, None if self.scale is None else next(given), self.divides


def about(norm: Norm, value: Tensor) -> About | None:
    """What to store ``value``, which is normalised so, about; None where its codes need nothing besides.

    Raises:
        Unbounded: no storage is known whose error is small beside the value's deviation.
    """
    if not norm.is_known:
        raise Unbounded(UNKNOWN_NORM)
    within = [_is_one_number(each, norm, value) for each in (norm.mean, norm.scale) if each is not None]
    scale = norm.scale if not all(within) else None
    if scale is not None and not norm.is_direct:
        raise Unbounded(UNKNOWN_NORM)
    if norm.mean is None and scale is None:
        return None
    return About(norm.mean, scale, norm.divides, tuple(norm.seen_as))  # type: ignore[arg-type]


def _is_one_number(statistic: Node, norm: Norm, value: Tensor) -> bool:
    """Whether a statistic is the same for all elements of a row of the value's memory, and so of each of its groups."""
    order = memory_order(value)
    shape: Sequence[object] = norm.seen_as
    of = statistic.meta["val"].shape
    sizes: Sequence[object] = [1] * (len(shape) - len(of)) + list(of)
    if order is not None:
        if tuple(shape) != tuple(value.shape):
            return False
        shape, sizes = [shape[d] for d in order], [sizes[d] for d in order]
    row = _row_length([value.shape[d] for d in order or range(value.dim())])
    run = 1
    for length, size in zip(reversed(shape), reversed(sizes), strict=True):
        if not (isinstance(size, int) and size == 1):
            break
        run *= length if isinstance(length, int) else math.inf  # type: ignore[assignment]
    return row is not None and (run == math.inf or (run >= row and run % row == 0))


def _row_length(shape: Sequence[int]) -> int | None:
    row = 1
    for size in reversed(shape):
        if not isinstance(size, int):
            return None
        row *= size
        if row >= 16:
            return row
    return row
