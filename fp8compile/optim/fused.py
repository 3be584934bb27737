"""The compiled step: one graph for some parameters of one shape, decode, update and encode in it, written in place.

Parameters that agree in plan, shape, strides and device share compiled code. Small ones are taken several at a time, so
that Inductor's combo kernels launch them together: always the same number, then one by one, so that parameters may come
and go and nothing is compiled again. Dynamo is not asked: its guards cost host time, and its limit on recompilations
counts shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8compile import torch_private as private
from fp8compile.numerics.grouping import rows_of
from fp8compile.optim.plan import Plan, Tensors

TOGETHER_NUMEL = 2**20  # elements from which a parameter keeps a GPU busy by itself
MOST_TOGETHER = 4  # compile time grows with it
NOT_IN_ROWS = ("step", "numbers", "stream")
# One launch for several parameters; what they need of memory has been decided by the caller, and is nothing.
INDUCTOR = {"combo_kernels": True, "benchmark_combo_kernel": False, "combo_kernel_peak_memory_pct_threshold": None}

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
        """How many such parameters one launch takes."""
        _, shape, _, _, device = self.layouts[0]
        numel = max(1, shape.numel())
        return 1 if device.type == "cpu" else max(1, min(MOST_TOGETHER, TOGETHER_NUMEL // numel))


def run(plan: Plan, several: Sequence[Tensors], *, compiled: bool) -> None:
    """Update parameters, each given by its tensors (see ``Plan.__call__``), in place."""
    if not compiled:
        for tensors in several:
            in_place(plan, [tensors])
        return
    waiting: dict[Signature, list[Tensors]] = {}
    for tensors in several:
        for piece, views in in_rows(plan, tensors):
            waiting.setdefault(Signature.of(piece, views), []).append(views)
    for signature, alike in waiting.items():
        for chunk in _chunks(alike, signature.together):
            key = signature, len(chunk)
            if key not in COMPILED:
                COMPILED[key] = compile_step(signature.plan, chunk)
            COMPILED[key]([t for tensors in chunk for t in tensors.values()])


def in_rows(plan: Plan, tensors: Tensors) -> list[tuple[Plan, Tensors]]:
    """The same tensors viewed as rows of one group each, ``[numel / G, G]``.

    So parameters of other shapes share compiled code, and Inductor sees at a glance that all is one loop. Rows that end
    in a short group make two: ``[R, full groups, G]`` and ``[R, tail]``.
    """
    size, p = plan.group_size, tensors["param"]
    if size is None or not p.is_contiguous():
        return [(plan, tensors)]
    fixed = {name: tensors[name] for name in NOT_IN_ROWS if name in tensors}
    moving = {name: t for name, t in tensors.items() if name not in fixed}
    if size == 1:
        return [(plan, fixed | {name: t.reshape(-1) for name, t in moving.items()})]
    _, length = rows_of(p.shape, size)
    if length <= size or length % size == 0:
        rows = p.numel() // min(size, length)
        return [(plan, fixed | {name: t.reshape(rows, -1) for name, t in moving.items()})]
    full, rows = length // size, p.numel() // length
    groups, tails = dict(fixed), dict(fixed)
    for name, t in moving.items():
        t_RC = t.reshape(rows, -1)
        cut = _columns_of(full, t_RC.shape[1], length, size)
        groups[name], tails[name] = t_RC[:, :cut].unflatten(1, (full, -1)), t_RC[:, cut:]
    return [(plan, groups), (replace(plan, offset=full * size), tails)]


def _columns_of(full: int, columns: int, length: int, size: int) -> int:
    """How many of a tensor's columns belong to the full groups: it has one per element, per group, or per two elements."""
    if columns == length:
        return full * size
    return full if columns == full + 1 else full * size // 2


def _chunks(alike: list[Tensors], together: int) -> list[list[Tensors]]:
    whole = len(alike) - len(alike) % together
    return [alike[i : i + together] for i in range(0, whole, together)] + [[each] for each in alike[whole:]]


def in_place(plan: Plan, several: Sequence[Tensors]) -> None:
    """The step as plain torch: compute everything, then write it."""
    made = [plan(tensors) for tensors in several]
    for tensors, new in zip(several, made, strict=True):
        for name, value in new.items():
            tensors[name].copy_(value)


def compile_step(plan: Plan, several: Sequence[Tensors]) -> Compiled:
    """Compiled code for a step of parameters laid out like ``several``; takes their tensors as one flat list."""
    graph, flat = traced_step(plan, several)
    compiled = private.compile_fx(graph, flat, config_patches=inductor_options())

    def run_compiled(tensors: list[Tensor]) -> None:
        with torch.no_grad():
            compiled(*tensors)

    return run_compiled


def inductor_options() -> dict[str, Any]:
    """INDUCTOR, as far as this version of torch knows it."""
    return {name: value for name, value in INDUCTOR.items() if hasattr(private.inductor_config, name)}


def traced_step(plan: Plan, several: Sequence[Tensors]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The step as a graph of ATen operations on a flat list of tensors, and such a list."""
    flat, spec = pytree.tree_flatten(list(several))

    def step(*tensors: Tensor) -> tuple[()]:
        in_place(plan, pytree.tree_unflatten(list(tensors), spec))
        return ()

    with torch.no_grad():
        return private.make_fx(step, tracing_mode="fake", decomposition_table={})(*flat), flat
