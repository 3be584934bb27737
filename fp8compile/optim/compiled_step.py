"""The compiled step: one graph for some parameters of one shape, which decodes, updates, encodes and writes in place.

Parameters that agree in plan, shape, strides and device share compiled code. Small ones are taken several at a time, so
that Inductor's combo kernels launch them together. The number is always the same, and the rest go one by one, so parameters
may come and go and nothing is compiled again. Dynamo is not used: its guards cost host time, and its limit on recompilations
counts shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.optim.plan import Plan, Tensors
from fp8compile.optim.planes import updated
from fp8compile.optim.row_views import View, pieces, viewed
from fp8compile.optim.step_codes import AMAX, INV_SCALE, KNOWN, REACH, ROWS

TOGETHER_NUMEL = 2**20  # elements from which a parameter keeps a GPU busy by itself
MOST_TOGETHER = 4  # compile time grows with it
# One launch for several parameters. Inductor's limit on the memory this may cost is for intermediates; there are none here.
INDUCTOR = {"combo_kernels": True, "benchmark_combo_kernel": False, "combo_kernel_peak_memory_pct_threshold": None}
NEW = ("grad", ROWS, INV_SCALE, KNOWN, AMAX, REACH)  # tensors that are new at every step

Compiled = Callable[[list[Tensor]], Any]
COMPILED: dict[Any, Compiled] = {}  # by Signature and count; grows with distinct shapes, not with steps


@dataclass(frozen=True)
class Signature:
    """What compiled code depends on: the plan and the layout of every tensor."""

    plan: Plan
    layouts: tuple[tuple[str, torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, plan: Plan, tensors: Tensors) -> Signature:
        layouts = ((name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors.items())
        return cls(plan, tuple(layouts))

    @property
    def together(self) -> int:
        """How many such parameters one launch updates."""
        _, shape, _, _, device = self.layouts[0]
        numel = max(1, shape.numel())
        return 1 if device.type == "cpu" else max(1, min(MOST_TOGETHER, TOGETHER_NUMEL // numel))


@dataclass(frozen=True)
class Piece:
    """One piece of one parameter: its tensors, and how it views those that are new at every step, as a gradient is."""

    index: int
    tensors: Tensors
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
                piece = Piece(index, viewed(tensors, view), view)
                waiting.setdefault(Signature.of(piece_plan, piece.tensors), []).append(piece)
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


def _compiled(signature: Signature, chunk: list[Piece]) -> Compiled:
    key = signature, len(chunk)
    if key not in COMPILED:
        COMPILED[key] = compile_step(signature.plan, [piece.tensors for piece in chunk])
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


def compile_step(plan: Plan, several: Sequence[Tensors]) -> Compiled:
    """Compiled code for a step of parameters laid out like ``several``; takes their tensors as one flat list."""
    graph, flat = traced_step(plan, several)
    compiled: Any = private.compile_fx(graph, flat, config_patches=inductor_options())
    return lambda tensors: compiled(*tensors)


def inductor_options() -> dict[str, Any]:
    """The options in INDUCTOR that this version of torch has."""
    return {name: value for name, value in INDUCTOR.items() if hasattr(private.inductor_config, name)}


def traced_step(plan: Plan, several: Sequence[Tensors]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The step as a graph of ATen operations on a flat list of tensors, and such a list."""
    flat = [t for tensors in several for t in tensors.values()]

    def step(*tensors: Tensor) -> tuple[()]:
        in_place(plan, _unflattened(tensors, several))
        return ()

    with torch.no_grad():
        return private.make_fx(step, tracing_mode="fake", decomposition_table={})(*flat), flat
