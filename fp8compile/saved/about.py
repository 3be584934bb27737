"""About which statistics a value that is normalised is stored: those that are not one number over each of its groups.

    RMSNorm, x / |x|                        nothing: over a row the statistic is one number, as the scale of each group is
    LayerNorm, GroupNorm, BatchNorm         about the mean, where a group lies within the elements of a statistic
    BatchNorm of rows or channels-last      about the mean and the deviation of each channel

See fp8compile/analysis/norms.py and fp8compile/numerics/deviations.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.analysis.norms import Norm, way_to
from fp8compile.analysis.ranges.matching import CAST_PACKETS, RESHAPE_PACKETS, packet
from fp8compile.analysis.sensitivity.error import Error, Unbounded
from fp8compile.fx.graph import is_size, memory_order
from fp8compile.numerics.deviations import deviation, from_deviation
from fp8compile.numerics.groups import Groups

aten = torch.ops.aten

UNKNOWN_NORM = "normalised in a way that is not known: nothing bounds its error beside its deviation"
ABOUT_MEAN, ABOUT_BOTH, OF_SIZE = "centred", "standardised", "over its size"


@dataclass(frozen=True)
class View:
    """A step from a value's shape to another: a permutation, or a reshape; ``before`` is the shape that it starts from."""

    before: tuple[int | torch.SymInt, ...]
    after: tuple[int | torch.SymInt, ...]
    permuted: tuple[int, ...] = ()

    def of(self, x: Tensor) -> Tensor:
        return x.permute(self.permuted) if self.permuted else x.reshape(self.after)

    def back(self, x: Tensor) -> Tensor:
        if not self.permuted:
            return x.reshape(self.before)
        return x.permute(tuple(self.permuted.index(d) for d in range(len(self.permuted))))


@dataclass(frozen=True)
class About:
    """The statistics that a value is stored about.

    Attributes:
        mean, scale, divides: see ``Norm``; ``mean`` and ``scale`` are None where it is not stored about them.
        views: from the value's shape to the one over which the statistics broadcast.
        sizes: the numbers in ``views`` that only a run knows.
    """

    mean: Node | None
    scale: Node | None
    divides: bool
    views: tuple[View, ...]
    sizes: tuple[Node, ...] = ()

    @property
    def beside(self) -> tuple[Node, ...]:
        """What ``deviation`` and ``value`` are given: nodes of the forward. Sizes are read off ``views``; they are given so
        that whoever traces these functions knows their symbols."""
        return (*self.statistics, *self.sizes)

    @property
    def statistics(self) -> tuple[Node, ...]:
        """Nodes of the forward."""
        return tuple(node for node in (self.mean, self.scale) if node is not None)

    @property
    def name(self) -> str:
        return OF_SIZE if self.mean is None else ABOUT_MEAN if self.scale is None else ABOUT_BOTH

    @property
    def error(self) -> Error:
        """Of a value stored so, in units of its largest: relative to its distance from the mean, twice that at most. Of one
        in deviations nothing is claimed: a small channel is off by a share of a large one's deviations."""
        return Error(absolute=2.0 if self.scale is None else math.inf, shifted=self.mean is not None)

    def deviation(self, x: Tensor, beside: Sequence[Tensor]) -> Tensor:
        """FP32, in ``x``'s shape; ``beside`` as in the property."""
        return self._back(deviation(self._viewed(x), *self._by_name(beside)))

    def value(self, z: Tensor, beside: Sequence[Tensor]) -> Tensor:
        """What ``deviation`` made ``z`` of, in FP32."""
        return self._back(from_deviation(self._viewed(z), *self._by_name(beside)))

    def _viewed(self, x: Tensor) -> Tensor:
        for view in self.views:
            x = view.of(x)
        return x

    def _back(self, x: Tensor) -> Tensor:
        for view in reversed(self.views):
            x = view.back(x)
        return x

    def _by_name(self, beside: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, bool]:
        given = iter(beside)
        mean = None if self.mean is None else next(given)
        return mean, None if self.scale is None else next(given), self.divides


def about(norm: Norm, stored: Node, groups: Groups) -> About | None:
    """What to store a value about that is normalised so; None where its codes need nothing besides.

    Args:
        norm: of the value.
        stored: the view or cast of it that is stored.
        groups: of its codes.

    Raises:
        Unbounded: no storage is known whose error is small beside the value's deviation.
    """
    if not norm.is_known or norm.seen is None:
        raise Unbounded(UNKNOWN_NORM)
    given = [each for each in (norm.mean, norm.scale) if each is not None]
    within = all(_is_one_number(each, norm.seen, stored, groups) for each in given)
    if within and norm.mean is None:
        return None
    views = _views(stored, norm.seen) if norm.is_direct else None
    if views is None:
        raise Unbounded(UNKNOWN_NORM)
    sizes = dict.fromkeys(n for step in way_to(norm.seen) for n in step.all_input_nodes if is_size(n))
    return About(norm.mean, None if within else norm.scale, norm.divides, views, tuple(sizes))


def _views(stored: Node, seen: Node) -> tuple[View, ...] | None:
    """The way from what is stored to what a norm sees; None where both are views of a third value, in other orders."""
    ours, theirs = way_to(stored), way_to(seen)
    if ours[-1] in theirs:
        steps = theirs[theirs.index(ours[-1]) + 1 :]
        return tuple(_view(n) for n in steps if packet(n) not in CAST_PACKETS)
    if ours[0] is theirs[0] and all(packet(n) in CAST_PACKETS | RESHAPE_PACKETS for n in (*ours[1:], *theirs[1:])):
        return (View(_shape(stored), _shape(seen)),)
    return None


def _view(node: Node) -> View:
    parent: Any = node.args[0]
    given: Any = node.args[1:]
    dims = range(parent.meta["val"].dim())
    permuted: tuple[int, ...] = ()
    if packet(node) is aten.permute:
        permuted = tuple(d % len(dims) for d in given[0])
    elif packet(node) in (aten.transpose, aten.t):
        a, b = (d % len(dims) for d in given) if given else (0, len(dims) - 1)
        permuted = tuple(b if d == a else a if d == b else d for d in dims)
    return View(_shape(parent), _shape(node), permuted)


def _shape(node: Node) -> tuple[int | torch.SymInt, ...]:
    return tuple(node.meta["val"].shape)


def _is_one_number(statistic: Node, seen: Node, stored: Node, groups: Groups) -> bool:
    """Whether a statistic is the same for all elements of each group of the codes of what is stored."""
    if any(packet(n) is aten.clone for n in way_to(seen)):
        return False  # the memory of what is seen may be another
    value, shape, of = seen.meta["val"], _shape(seen), _shape(statistic)
    sizes = [1] * (len(shape) - len(of)) + list(of)
    run = 1  # of so many elements in memory the statistic is the same
    by_stride = zip(value.stride(), shape, sizes, strict=True)
    for stride, length, size in sorted((d for d in by_stride if isinstance(d[0], int)), key=lambda d: d[0]):
        if length == 1:
            continue
        if stride != run or not isinstance(size, int) or size != 1:
            return _holds_groups(run, stored.meta["val"], groups)
        if not isinstance(length, int):
            return _holds_groups(run, stored.meta["val"], groups)
        run *= length
    return True


def _holds_groups(run: int, value: Tensor, groups: Groups) -> bool:
    """Whether each group of a value's codes lies within a stretch of ``run`` elements of its memory."""
    order = memory_order(value) or range(value.dim())
    row = groups.row([value.shape[d] for d in order])
    if not isinstance(row, int):
        return False
    return run % row == 0 or (row % run == 0 and run % groups.size(row) == 0)
