"""Few launches for many parameters: on a GPU one for all that share a kernel, by a table of pointers (``kernel_text.py``).

    which kernel     Inductor compiles the step of one parameter; its kernels are caught as text, and none is compiled
    its arguments    each parameter's code runs once, and what it hands to the kernel is noted, in place of a launch
    a step           addresses of what is new, gradients mostly, are copied to the device; one launch

A parameter whose code launches another number of kernels, or needs memory of its own, runs by itself.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import add
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.optim import kernel_text
from fp8compile.optim.kernel_text import ALIGNED, KernelText
from fp8compile.optim.open_sizes import Sizes
from fp8compile.optim.plan import Tensors
from fp8compile.optim.row_views import View, viewed
from fp8compile.optim.step_codes import AMAX, INV_SCALE, KNOWN, REACH, ROWS

NEW = ("grad", ROWS, INV_SCALE, KNOWN, AMAX, REACH)  # tensors that are new at every step
ELEMENTS, WARPS = 1024, 4

Code = Callable[[list[Tensor]], Any]
Launch = Callable[[Sequence[Tensors]], None]
_noted: list[tuple[Caught, tuple[Any, ...]]] | None = None


@dataclass(frozen=True)
class Piece:
    """One piece of one parameter.

    Attributes:
        index: of the parameter.
        tensors: what code takes.
        sizes: that code leaves open.
        view: how it views tensors that are new at every step, as a gradient is.
        offsets: of these views, in bytes, by name.
    """

    index: int
    tensors: Tensors
    sizes: Sizes
    view: View
    offsets: Mapping[str, int]

    def forget_new(self) -> None:
        """Hold none of those of the first step, once compiled code is chosen by their layout."""
        self.tensors.update({name: torch.empty(0) for name in self.offsets})

    def with_new(self, new: Sequence[Tensors]) -> Tensors:
        return self.tensors | viewed(new[self.index], self.view)

    @functools.cached_property
    def parameters(self) -> list[Tensor]:
        """What autograd, and who keeps codes of weights, must see written: a kernel does it unseen."""
        return [t for name, t in self.tensors.items() if name.partition("/")[0] == "param"]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device


def offsets_of(views: Tensors, whole: Tensors) -> dict[str, int]:
    """In bytes, how far into its tensor each view of a new one begins, which is contiguous or a copy that is."""
    found = {}
    for name, t in views.items():
        if (base := name.partition("/")[0]) in NEW:
            begin = whole[base].storage_offset() if whole[base].is_contiguous() else 0
            found[name] = int(t.storage_offset() - begin) * t.element_size()
    return found


@dataclass
class Caught:
    """Stands for a kernel that Inductor wrote; compiled where it is launched after all."""

    name: str
    source: str
    device: str
    compile: Callable[[str, str, str], Any]
    _compiled: Any = field(default=None, init=False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if _noted is not None:
            return _noted.append((self, args))
        if self._compiled is None:
            made = self.compile(self.name, self.source, self.device)
            self._compiled = made.result() if hasattr(made, "result") else made
        return self._compiled.run(*args, **kwargs)


@contextmanager
def caught() -> Iterator[None]:
    """Triton kernels that Inductor writes inside are caught, and not compiled."""
    plain = private.AsyncCompile.triton

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Caught:
        return Caught(kernel_name, source_code, device_str, functools.partial(plain, self))

    with mock.patch.object(private.AsyncCompile, "triton", triton):
        yield


def launched(code: Code, piece: Piece) -> tuple[Caught, tuple[Any, ...]] | None:
    """The one caught kernel that code would launch, and its arguments; None if it is not one. What is not caught runs."""
    global _noted
    _noted = []
    try:
        code([*piece.tensors.values()])
        found = _noted
    finally:
        _noted = None
    return found[0] if len(found) == 1 else None


def in_few_launches(codes: Sequence[Code], pieces: Sequence[Piece], *, together: bool, groups: int) -> list[Launch]:
    """The launches of pieces that share a signature.

    Args:
        together: one for many of them, where their code permits it.
        groups: of a block (``UpdatePlan.groups_of_a_block``).
    """
    members: dict[Any, list[Member]] = {}
    launches: list[Launch] = []
    for code, piece in zip(codes, pieces, strict=True):
        found = _member(code, piece) if together else None
        if found is None:
            launches.append(functools.partial(_by_itself, code, piece))
        else:
            kernel, member = found
            members.setdefault((kernel, member.new), []).append(member)
    launches += [OneLaunch(kernel, several, groups=groups) for (kernel, _), several in members.items()]
    for piece in pieces:
        piece.forget_new()
    return launches


def _by_itself(code: Code, piece: Piece, new: Sequence[Tensors]) -> None:
    code([*piece.with_new(new).values()])
    torch.autograd.graph.increment_version(piece.parameters)


@dataclass(frozen=True)
class Member:
    """A piece in a launch.

    Attributes:
        row: what its kernel takes: addresses and numbers.
        new: the names of arguments that are new at every step, by number.
    """

    piece: Piece
    row: tuple[int, ...]
    new: tuple[tuple[int, str], ...]


def _member(code: Code, piece: Piece) -> tuple[KernelText, Member] | None:
    launch = launched(code, piece)
    kernel = kernel_text.parsed(launch[0].source) if launch else None
    if launch is None or kernel is None or len(launch[1]) != len(kernel.types):
        return None
    names = {id(t): name for name, t in piece.tensors.items()}
    new, row = [], []
    for i, each in enumerate(launch[1]):
        if isinstance(each, Tensor):
            name = names.get(id(each))
            aligned = each.data_ptr() % ALIGNED == 0 and piece.offsets.get(name or "", 0) % ALIGNED == 0
            if name is None or each.device != piece.device or not (aligned or i not in kernel.divisible):
                return None  # memory of its own, or a copy of what is not aligned
            if name in piece.offsets:
                new.append((i, name))
        elif type(each) is not int:
            return None
        row.append(each.data_ptr() if isinstance(each, Tensor) else each)
    return kernel, Member(piece, tuple(row), tuple(new))


def rows_of_a_block(kernel: KernelText, *, groups: int) -> int:
    """Short groups are more to a block; a group of 128 in planes, whose rows are shorter, is one row."""
    if kernel.row == 1:
        return ELEMENTS
    return max(8, ELEMENTS // 4 // kernel.row) * groups // 8


class OneLaunch:
    """One launch for pieces that share a kernel.

    Args:
        kernel: of one piece.
        members: whose ``new`` agree.
        groups: of a block.
    """

    def __init__(self, kernel: KernelText, members: Sequence[Member], *, groups: int) -> None:
        self._members, rows = members, rows_of_a_block(kernel, groups=groups)
        fresh = tuple(i for i, _ in members[0].new)
        same = kernel_text.same_pointers(kernel, [member.row for member in members], fresh)
        function = loaded(kernel_text.for_many(kernel, fresh, same))
        count = kernel.names.index("xnumel")
        blocks = torch.tensor([-(-member.row[count] // rows) for member in members])
        first = blocks.cumsum(0) - blocks
        table = torch.cat([torch.tensor([member.row for member in members]), first[:, None]], 1)
        owners = torch.arange(len(members), dtype=torch.int32).repeat_interleave(blocks)
        self._device = members[0].piece.device
        self._table, self._owners = table.to(self._device), owners.to(self._device)
        self._launch = functools.partial(function[(len(owners),)], XBLOCK=rows, num_warps=WARPS)
        self._parameters = [t for member in members for t in member.piece.parameters]
        new = [(member.piece, name) for member in members for _, name in member.new]
        self._new = [(piece.index, name.partition("/")[0]) for piece, name in new]
        self._offsets = [piece.offsets[name] for piece, name in new]

    def __call__(self, new: Sequence[Tensors]) -> None:
        tensors = [new[index][name] for index, name in self._new]
        addresses = [*map(Tensor.data_ptr, tensors)]
        if not all(map(Tensor.is_contiguous, tensors)) or any(map((ALIGNED - 1).__and__, addresses)):
            tensors = [*map(_copied, tensors)]  # held until the launch: then the stream keeps order
            addresses = [*map(Tensor.data_ptr, tensors)]
        begins = array("q", map(add, addresses, self._offsets))
        fresh = torch.frombuffer(begins, dtype=torch.int64) if begins else torch.empty(0, dtype=torch.int64)
        fresh = fresh.to(self._device, non_blocking=True)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._launch(self._table, fresh, self._owners)
        torch.autograd.graph.increment_version(self._parameters)


def _copied(t: Tensor) -> Tensor:
    """It, or a copy where a kernel could not take it."""
    kept = t.is_contiguous() and t.data_ptr() % ALIGNED == 0
    return t if kept else t.clone(memory_format=torch.contiguous_format)


@functools.cache
def loaded(source: str) -> Any:
    """The Triton function of a source, from a file, which Triton reads it from."""
    return getattr(private.PyCodeCache.load(source), kernel_text.NAME)
