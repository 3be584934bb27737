"""Few-Bit Backward (Novikov et al. 2023, 2202.00441): an activation's derivative as a constant on each of 2**b pieces.

    y = f(x)         exact, as ever
    index            the piece that x lies in, b bits: all that is kept of x        piece i is (border i - 1, border i]
    dx = level[index] * dy

    error = integral of w(x) (f'(x) - q(x))**2 dx        w: the density of x        q = level[index(x)]

For given borders the best level is the w-weighted mean of f' on its piece. Borders are found by the dynamic programme

    least(k, j) = min over i < j of least(k - 1, i) + cost(i, j)      cost(i, j): the error of one piece from edge i to edge j

over the edges of a fine grid: the best of all borders that lie on the grid, whatever f' looks like. Two densities:

    normal    mean 0, variance 1
    uniform   1 on [-100, 100], which the paper's published tables minimise: in effect the error over all x

A table is computed once, and is a literal in ``few_bit_tables``. The gradient is biased where x is not distributed as w says:
no more than the table's largest distance from f', for any x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (1, 2, 3, 4)
DENSITIES = ("normal", "uniform")
NEAR, FAR = 10.0, 100.0  # borders are looked for within NEAR; uniform goes on to FAR
CELLS = 2000  # of the grid on [-NEAR, NEAR]: edges are 0.01 apart
POINTS = 16  # of the midpoint rule in a cell
FAR_POINTS = 4096  # in each of the two cells beyond NEAR

_WORDS = {1: (8, 1), 2: (4, 1), 3: (8, 3), 4: (2, 1)}  # codes and bytes of a word


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


def _gelu(x: Tensor) -> Tensor:
    share: Tensor = torch.special.ndtr(x)
    return share + x * _normal_density(x)


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _sigmoid(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _tanh(x: Tensor) -> Tensor:
    return 1 - torch.tanh(x).square()


def _elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, torch.exp(x.clamp(max=0)))


DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "silu": _silu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "elu": _elu,
    "softplus": torch.sigmoid,
}  # GELU is the exact one; ELU has alpha = 1, softplus beta = 1


@dataclass(frozen=True)
class Pieces:
    """A piecewise constant function: ``levels[i]`` on (borders[i - 1], borders[i]], the first and last piece without end.

    Attributes:
        borders: ascending, one fewer than levels.
        levels: 2, 4, 8 or 16.
    """

    borders: tuple[float, ...]
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.levels) == len(self.borders) + 1 and len(self.levels) in (2, 4, 8, 16)

    @property
    def bits(self) -> int:
        return len(self.levels).bit_length() - 1

    def index(self, x: Tensor) -> Tensor:
        """The piece of each element: uint8 in x's shape. NaN lies in the first piece."""
        found = torch.zeros_like(x, dtype=torch.uint8)
        for border in self.borders:
            found = found + (x > border).to(torch.uint8)
        return found

    def at(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The level of each piece number."""
        return torch.tensor(self.levels, dtype=dtype, device=index.device)[index.long()]


def nbytes(numel: int, bits: int) -> int:
    """Bytes that so many packed piece numbers take; the last word is a full one."""
    codes, size = _WORDS[bits]
    return -(-numel // codes) * size


def pack(index: Tensor, bits: int) -> Tensor:
    """Piece numbers of any shape as uint8 ``[nbytes]``: low bits first, filled up with zeros."""
    codes, size = _WORDS[bits]
    flat = torch.nn.functional.pad(index.reshape(-1), (0, -index.numel() % codes)).reshape(-1, codes).int()
    word = functools.reduce(torch.bitwise_or, [flat[:, i] << (bits * i) for i in range(codes)])
    return torch.stack([((word >> (8 * q)) & 255).to(torch.uint8) for q in range(size)], -1).reshape(-1)


def unpack(packed: Tensor, bits: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The uint8 piece numbers of ``shape`` that ``pack`` packed."""
    codes, size = _WORDS[bits]
    parts = packed.reshape(-1, size).int()
    word = functools.reduce(torch.bitwise_or, [parts[:, q] << (8 * q) for q in range(size)])
    each = torch.stack([(word >> (bits * i)) & (2**bits - 1) for i in range(codes)], -1).to(torch.uint8)
    return each.reshape(-1)[: math.prod(shape)].reshape(shape)


# --------------------------------------------------------------------------------------------- how tables are made


@dataclass(frozen=True)
class CellSums:
    """Sums over cells up to each edge, FP64 ``[E]`` each: of w, of w f' and of w f'^2, times the width."""

    edges: Tensor
    mass: Tensor
    first: Tensor
    second: Tensor

    def costs(self) -> Tensor:
        """``[E, E]``: the error of one piece from edge i to edge j > i; inf elsewhere, 0 without mass."""
        mass, first, second = (s[None, :] - s[:, None] for s in (self.mass, self.first, self.second))
        cost = second - torch.where(mass > 0, first.square() / torch.where(mass > 0, mass, 1.0), 0.0)
        i = torch.arange(len(self.edges))
        return torch.where(i[:, None] < i[None, :], cost.clamp_min(0), torch.inf)


def grid_of(derivative: Callable[[Tensor], Tensor], density: str) -> CellSums:
    """The grid of a derivative under one of ``DENSITIES``."""
    edges = torch.linspace(-NEAR, NEAR, CELLS + 1, dtype=torch.float64)
    sums = _cells(derivative, density, edges, POINTS)
    if density == "uniform":
        ends = torch.tensor([NEAR, FAR], dtype=torch.float64)
        before, after = (_cells(derivative, density, e, FAR_POINTS) for e in (-ends.flip(0), ends))
        edges = torch.cat([-ends[1:], edges, ends[1:]])
        sums = torch.cat([before, sums, after], -1)
    mass, first, second = torch.nn.functional.pad(sums.cumsum(-1), (1, 0)).unbind(0)
    return CellSums(edges, mass, first, second)


def _cells(derivative: Callable[[Tensor], Tensor], density: str, edges: Tensor, points: int) -> Tensor:
    """``[3, cells]``: the integrals of w, w f' and w f'^2 over each cell, by the midpoint rule."""
    width = edges.diff()
    x = edges[:-1, None] + width[:, None] * (torch.arange(points) + 0.5) / points
    w = (_normal_density(x) if density == "normal" else torch.ones_like(x)) * width[:, None] / points
    slope = derivative(x)
    return torch.stack([(w * slope**power).sum(-1) for power in range(3)])


def best_pieces(grid: CellSums, bits: int) -> Pieces:
    """The best 2**bits pieces whose borders are edges of the grid, by the dynamic programme."""
    costs = grid.costs()
    least, choices = costs[0], []
    for _ in range(2**bits - 1):
        least, choice = (least[:, None] + costs).min(0)
        choices.append(choice)
    at, ends = len(grid.edges) - 1, []
    for choice in reversed(choices):
        at = int(choice[at])
        ends.append(at)
    return _with_levels(grid, ends[::-1])


def _with_levels(grid: CellSums, borders: list[int]) -> Pieces:
    """Pieces between these edges, each with its best level."""
    ends = torch.tensor([0, *borders, len(grid.edges) - 1])
    levels = grid.first[ends].diff() / grid.mass[ends].diff()
    return Pieces(tuple(grid.edges[ends[1:-1]].tolist()), tuple(levels.tolist()))


def error_of(derivative: Callable[[Tensor], Tensor], pieces: Pieces, density: str) -> float:
    """The integral at the head of this file for any pieces, by the same midpoint rule."""
    edges = torch.linspace(-NEAR, NEAR, CELLS + 1, dtype=torch.float64)
    found = _error_between(derivative, pieces, density, edges, POINTS)
    if density == "uniform":
        for ends in ([-FAR, -NEAR], [NEAR, FAR]):
            found += _error_between(derivative, pieces, density, torch.tensor(ends).double(), FAR_POINTS)
    return found


def _error_between(
    derivative: Callable[[Tensor], Tensor], pieces: Pieces, density: str, edges: Tensor, points: int
) -> float:
    def off(x: Tensor) -> Tensor:
        return derivative(x) - pieces.at(pieces.index(x), x.dtype)

    return float(_cells(off, density, edges, points)[2].sum())
