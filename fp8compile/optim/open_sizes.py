"""Layouts whose sizes are left open, so that parameters of all shapes share compiled code.

    param [4096, 128], exp_avg.amax [4096, 1]   ->   param [rows, 128], exp_avg.amax [rows, 1]     2 <= rows < 2**31 / 128

A size that is left open has a name in a layout: layouts that are equal fit the same code. Sizes of 1 are never left open, nor
are a group's 128 elements. A short group is left open too, unless it is a power of two and a row by itself: those are few.
What is a multiple of eight stays one, ``8 * width``, so that a GPU may load eight elements at once. On a CPU the number of
rows alone is left open: a C++ compiler takes twice as long where loops in a row have no known length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)

from fp8compile import _torch as private
from fp8compile.numerics.states.interface import GROUP

MOST = 2**31 - 1  # elements that 32-bit numbers count: a larger tensor has code of its own
ROWS, GROUPS, WIDTH = "rows", "groups", "width"
FACTOR = 8


class Open(NamedTuple):
    """A size that is left open, as a multiple of a number: ``factor * name``."""

    name: str
    factor: int


Size = int | Open
Sizes = dict[Open, int]  # the numbers that they are, by ``Open``, in one parameter


@dataclass(frozen=True)
class TensorLayout:
    """A tensor as compiled code sees it; ``aligned``: whether its first element is, to 16 bytes."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True


def closed(tensors: Mapping[str, Tensor]) -> dict[str, TensorLayout]:
    """The layouts of tensors, nothing of them left open."""
    return {name: TensorLayout(tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in tensors.items()}


def opened(
    tensors: Mapping[str, Tensor], *, rows_alone: bool, any_width: bool = False
) -> tuple[dict[str, TensorLayout], Sizes]:
    """The layouts of the parts of one parameter that are viewed by rows of one group, and the sizes left open in them.

    Args:
        tensors: ``[elements]``; ``[rows, width]``; or ``[rows, groups, width]``, some of them of width 1.
        rows_alone: leave the number of rows open and nothing else.
        any_width: of ``[rows, width]`` leave all open, as multiples of nothing.
    """
    if any(_extent(t) > MOST for t in tensors.values()):
        return closed(tensors), {}
    sizes: Sizes = {}
    if any_width:
        return {name: _opened_wide(t, sizes) for name, t in tensors.items()}, sizes
    widths = {t.shape[-1] for t in tensors.values() if t.dim() > 1} - {1}
    tail = any(t.dim() == 2 and t.stride(0) > GROUP for t in tensors.values())
    short = len(widths) == 1 and all(width < GROUP and (tail or width & (width - 1)) for width in widths)
    found = {name: _opened(t, sizes, short) for name, t in tensors.items()}
    return _rows_alone(found, sizes) if rows_alone else (found, sizes)


def _rows_alone(layouts: dict[str, TensorLayout], sizes: Sizes) -> tuple[dict[str, TensorLayout], Sizes]:
    def known(numbers: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(sizes[n] if isinstance(n, Open) and n.name != ROWS else n for n in numbers)

    found = {
        name: replace(each, shape=known(each.shape), stride=known(each.stride)) for name, each in layouts.items()
    }
    return found, {size: n for size, n in sizes.items() if size.name == ROWS}


def _extent(t: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _opened(t: Tensor, sizes: Sizes, short: bool) -> TensorLayout:
    *outer, width = t.shape if t.dim() > 1 else (t.shape[0], 1)
    shape = [_named(sizes, name, size) for name, size in zip((ROWS, GROUPS), outer, strict=False)]
    if t.dim() == 1:
        return TensorLayout((*shape,), (1,), t.dtype, t.device)
    last = _named(sizes, WIDTH, width) if short else width
    stride = [last] * len(outer)
    if t.shape[0] > 1 and t.stride(0) != width:
        within_a_group = 1 < width < t.stride(0) <= GROUP  # a plane
        stride[0] = t.stride(0) if within_a_group else _stride(sizes, t.stride(0))
    apart = width == 1 and isinstance(stride[0], Open)  # a column of metadata, which may begin anywhere
    return TensorLayout((*shape, last), (*stride, 1), t.dtype, t.device, aligned=not apart)


def _opened_wide(t: Tensor, sizes: Sizes) -> TensorLayout:
    rows, width = (_named(sizes, name, n, 1) for name, n in zip((ROWS, WIDTH), t.shape, strict=True))
    return TensorLayout((rows, width), (_stride(sizes, t.stride(0), 1), 1), t.dtype, t.device, aligned=False)


def _named(sizes: Sizes, name: str, size: int, factor: int | None = None) -> Size:
    if size == 1:
        return 1
    if factor is None:
        factor = FACTOR if name not in (ROWS, GROUPS) and size % FACTOR == 0 and size > FACTOR else 1
    found = Open(name, factor)
    assert sizes.setdefault(found, size) == size, (
        f"parts of one parameter differ in {name}: {sizes[found]} and {size}"
    )
    return found


def _stride(sizes: Sizes, stride: int, factor: int | None = None) -> Size:
    """Of a piece of longer rows. Strides that are equal have one name."""
    known = [each for each in sizes if each.name not in (ROWS, GROUPS, WIDTH)]
    equal = [each for each in known if sizes[each] == stride]
    return equal[0] if equal else _named(sizes, f"stride {len(known)}", stride, factor)


def numbers(several: Sequence[Sizes]) -> list[int]:
    """The numbers that ``Fakes.sizes`` are, of one parameter after the other."""
    return [n // size.factor for sizes in several for size, n in sizes.items()]


def _empty(layout: TensorLayout, shape: list[Any], stride: list[Any]) -> Tensor:
    """A tensor of a layout; where nothing is known of its alignment it begins in the midst of memory."""
    t = torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)
    return t if layout.aligned else t.as_strided(shape, stride, 1)


class Fakes:
    """Fake tensors of layouts, and what compiling has assumed of the sizes that are left open."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = private.FakeTensorMode(shape_env=self.env)
        self._symbols: list[dict[Open, Any]] = []

    def of(self, layouts: Mapping[str, TensorLayout], tuned_for: Sizes) -> dict[str, Tensor]:
        """Tensors of one parameter, with sizes of its own."""
        widest = max((n for layout in layouts.values() for n in layout.shape[1:] if isinstance(n, int)), default=1)
        symbols = {size: self._symbol(size, n, widest) for size, n in tuned_for.items()}
        self._symbols.append(symbols)

        def filled(numbers: Sequence[Size]) -> list[Any]:
            return [n.factor * symbols[n] if isinstance(n, Open) else n for n in numbers]

        with self.mode:
            return {name: _empty(each, filled(each.shape), filled(each.stride)) for name, each in layouts.items()}

    def _symbol(self, size: Open, tuned_for: int, widest: int) -> Any:
        most = {ROWS: MOST // widest, WIDTH: GROUP // size.factor}.get(size.name, MOST)
        bounds = StrictMinMaxConstraint(warn_only=False, vr=private.ValueRanges(2, most))
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[bounds])
        like = torch.empty(tuned_for // size.factor, device="meta")
        return self.mode.from_tensor(like, symbolic_context=context).shape[0]

    @property
    def sizes(self) -> list[Any]:
        """What code takes before the tensors: the sizes that are left open, without their factors."""
        return [symbol for symbols in self._symbols for symbol in symbols.values()]

    def fit(self, several: Sequence[Sizes]) -> bool:
        """Whether what was assumed holds for these sizes, those of one parameter after the other."""
        values = dict(zip([symbol.node.expr for symbol in self.sizes], numbers(several), strict=True))
        bounded = all(n in self.env.bound_sympy(symbol) for symbol, n in values.items())
        return bounded and all(guard.expr.xreplace(values) == True for guard in self.env.guards)  # noqa: E712
