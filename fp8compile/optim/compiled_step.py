"""The compiled step: one graph for some parameters, which decodes, updates, encodes and writes in place.

Parameters that agree in plan, layout and device share compiled code; how many rows of groups there are is left open
(``open_sizes.py``). Small ones are taken several at a time, so that Inductor's combo kernels launch them together. The number
is always the same, and the rest go one by one, so parameters may come and go and nothing is compiled again. Dynamo is not
used: its guards cost host time, and its limit on recompilations counts shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics.states.interface import GROUP
from fp8compile.optim.open_sizes import ROWS as OPEN_ROWS
from fp8compile.optim.open_sizes import Fakes, Layout, Sizes, closed, numbers, opened
from fp8compile.optim.plan import Plan, Tensors
from fp8compile.optim.planes import updated
from fp8compile.optim.row_views import FIXED, View, pieces, viewed
from fp8compile.optim.step_codes import AMAX, INV_SCALE, KNOWN, REACH, ROWS

TOGETHER = 4  # parameters of one launch on a GPU; compile time grows with it
SMALL, LARGE = 2**18, 2**22  # elements that code is tuned for: from more than SMALL on one parameter keeps a GPU busy
# One launch for several parameters. Inductor's limit on the memory this may cost is for intermediates; there are none here.
INDUCTOR = {"combo_kernels": True, "benchmark_combo_kernel": False, "combo_kernel_peak_memory_pct_threshold": None}
NEW = ("grad", ROWS, INV_SCALE, KNOWN, AMAX, REACH)  # tensors that are new at every step

Compiled = Callable[[list[Tensor]], Any]
COMPILED: dict[
    Any, tuple[Callable[..., Any], Fakes]
] = {}  # by Signature and count; grows with layouts, not with shapes


@dataclass(frozen=True)
class Signature:
    """What compiled code depends on: the plan, the layout of every tensor, and the size that it is tuned for."""

    plan: Plan
    layouts: tuple[tuple[str, Layout], ...]
    is_small: bool

    @property
    def together(self) -> int:
        """How many such parameters one launch updates."""
        return TOGETHER if self.is_small else 1


def signed(plan: Plan, tensors: Tensors) -> tuple[Signature, Tensors, Sizes]:
    """The signature of a piece's update; what code for it takes: the piece's tensors, and the sizes that it leaves open."""
    plan, tensors = _without_offset(plan, tensors)
    sizes, layouts = Sizes(), closed(tensors)
    planes = [t for name, t in tensors.items() if name.partition("/")[0] == "param"]
    on_cpu = planes[0].device.type == "cpu"
    if plan.by_rows:
        parts = {name: t for name, t in tensors.items() if name not in FIXED}
        left_open, sizes = opened(parts, rows_alone=on_cpu)
        layouts |= left_open
    is_small = not on_cpu and sum(t.numel() for t in planes) <= SMALL
    return Signature(plan, tuple(layouts.items()), is_small), tensors, sizes


@dataclass(frozen=True)
class Piece:
    """One piece of one parameter: its tensors, and how it views those that are new at every step, as a gradient is."""

    index: int
    tensors: Tensors
    sizes: Sizes
    view: View

    def forget_new(self) -> None:
        """Hold none of those of the first step, once compiled code is chosen by their layout."""
        self.tensors.update({name: torch.empty(0) for name in self.tensors if name.partition("/")[0] in NEW})

    def with_new(self, new: Sequence[Tensors]) -> Tensors:
        return self.tensors | viewed(new[self.index], self.view)


class PreparedStep:
    """The step of some parameters, prepared once: which compiled code takes which tensors.

    Args:
        several: for each parameter its plan and its tensors (see ``Plan.__call__``). They are held, and updated in place.
        compiled: False runs the step operation by operation.
    """

    def __init__(self, several: Sequence[tuple[Plan, Tensors]], *, compiled: bool) -> None:
        self._launches: list[tuple[Compiled, list[Piece]]] = []
        waiting: dict[Signature, list[Piece]] = {}
        for index, (plan, tensors) in enumerate(several):
            for piece_plan, view in pieces(plan, tensors["param"]) if compiled else [(plan, lambda t: t)]:
                signature, views, sizes = signed(piece_plan, viewed(tensors, view))
                waiting.setdefault(signature, []).append(Piece(index, views, sizes, view))
        for signature, alike in waiting.items():
            for chunk in _chunks(alike, signature.together):
                code = _compiled(signature, chunk) if compiled else functools.partial(_eager, signature.plan, chunk)
                self._launches.append((code, chunk))
            for piece in alike:
                piece.forget_new()

    def __call__(self, new: Sequence[Tensors]) -> None:
        """Update every parameter by its gradient, ``grad``, and the other tensors that are new at every step.

        They must have the layouts of the first ones.
        """
        with torch.no_grad():
            for code, chunk in self._launches:
                code([t for piece in chunk for t in piece.with_new(new).values()])


def _without_offset(plan: Plan, tensors: Tensors) -> tuple[Plan, Tensors]:
    """The offset of a piece is in its stream: code for it fits any."""
    if plan.rounds_stochastically and plan.offset:
        stream = tensors["stream"]
        tensors = tensors | {"stream": stream + torch.tensor([0, plan.offset], device=stream.device)}
    return replace(plan, offset=0), tensors


def _compiled(signature: Signature, chunk: list[Piece]) -> Compiled:
    """Code for some pieces. Whether it fits their sizes is asked once."""
    each = [piece.sizes for piece in chunk]
    code, fakes = compiled_for(signature, each)
    if not fakes.fit(each):
        return _one_by_one(signature, chunk)
    sizes = numbers(each)
    return lambda tensors: code(*sizes, *tensors)


def _one_by_one(signature: Signature, chunk: list[Piece]) -> Compiled:
    """Code for the sizes of each piece and no others."""
    exact = [tuple(closed(piece.tensors).items()) for piece in chunk]
    codes = [compiled_for(replace(signature, layouts=layouts), [{}])[0] for layouts in exact]

    def run(flat: list[Tensor]) -> None:
        for code, tensors in zip(codes, _unflattened(flat, [piece.tensors for piece in chunk]), strict=True):
            code(*tensors.values())

    return run


def compiled_for(signature: Signature, sizes: list[Sizes]) -> tuple[Callable[..., Any], Fakes]:
    key = signature, len(sizes)
    if key not in COMPILED:
        COMPILED[key] = compile_step(signature, sizes)
    return COMPILED[key]


def _eager(plan: Plan, chunk: list[Piece], flat: list[Tensor]) -> None:
    in_place(plan, _unflattened(flat, [piece.tensors for piece in chunk]))


def _unflattened(flat: Sequence[Tensor], like: Sequence[Tensors]) -> list[Tensors]:
    values = iter(flat)
    return [{name: next(values) for name in tensors} for tensors in like]


def _chunks(alike: list[Piece], together: int) -> list[list[Piece]]:
    whole = len(alike) - len(alike) % together
    return [alike[i : i + together] for i in range(0, whole, together)] + [[each] for each in alike[whole:]]


def in_place(plan: Plan, several: Sequence[Tensors]) -> None:
    """The step as plain torch: compute everything, then write it."""
    made = [updated(plan, tensors) if plan.planes > 1 else plan(tensors) for tensors in several]
    for tensors, new in zip(several, made, strict=True):
        for name, value in new.items():
            tensors[name].copy_(value)


def compile_step(signature: Signature, sizes: Sequence[Sizes]) -> tuple[Callable[..., Any], Fakes]:
    """Compiled code for a step of parameters, which takes the sizes that are left open and all tensors; and what it fits."""
    rows = (SMALL if signature.is_small else LARGE) // GROUP
    tuned_for = [{size: rows if size.name == OPEN_ROWS else n for size, n in each.items()} for each in sizes]
    graph, flat, fakes = traced_step(signature, tuned_for)
    with private.functorch_config.patch(
        enable_autograd_cache=False
    ):  # it has no key for what Dynamo has not captured
        compiled: Any = private.compile_fx(graph, flat, config_patches=inductor_options())
    return compiled, fakes


def inductor_options() -> dict[str, Any]:
    """The options in INDUCTOR that this version of torch has."""
    return {name: value for name, value in INDUCTOR.items() if hasattr(private.inductor_config, name)}


def traced_step(signature: Signature, tuned_for: Sequence[Sizes]) -> tuple[torch.fx.GraphModule, list[Any], Fakes]:
    """The step as a graph of ATen operations on sizes and tensors, and such a list, of fakes."""
    fakes = Fakes()
    several = [fakes.of(dict(signature.layouts), each) for each in tuned_for]
    flat = fakes.sizes + [t for tensors in several for t in tensors.values()]

    def step(*taken: Any) -> tuple[()]:
        in_place(signature.plan, _unflattened(taken[len(fakes.sizes) :], several))
        return ()

    # "symbolic": fake tensors, with Python's decompositions of what C++ does to known sizes alone
    with torch.no_grad():
        return private.make_fx(step, tracing_mode="symbolic", decomposition_table={})(*flat), flat, fakes
