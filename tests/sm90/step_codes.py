"""Optimizer steps that also write codes of the weight, to lower: in the step's kernel, and what turns them behind it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8compile.optim import code_writer, compiled_step, row_views
from fp8compile.optim.step_codes import KNOWN, ROWS, Wanted

from .lowering import LoweredGraph, lower
from .optimizers import ONLY_READ, Case, lowered_chunk


@dataclass(frozen=True)
class Lowering:
    """A step and what finishes it, lowered; and the least bytes that the step must move."""

    step: LoweredGraph
    finish: LoweredGraph
    least_bytes: int
    turned_in_the_step: LoweredGraph | None = None


def lowered_with_codes(case: Case, *, turned: bool = False) -> Lowering:
    """``turned``: lower also a step that stores the codes turned by itself, which is what is not done."""
    optimizer = case.build()
    (p,) = optimizer.param_groups[0]["params"]
    plan, tensors = optimizer.step_function(p)
    plan = replace(plan, codes=Wanted(p.dtype, by_rows=True, transposed=True))
    new = {KNOWN: torch.empty(2)} | code_writer._written(p)
    step = _step(plan, tensors | new, lambda t: t.view(p.numel() // 128, -1))
    N, K = p.shape
    across = None
    if turned:
        by_columns = torch.empty(K, N, dtype=torch.float8_e4m3fn).t()
        across = _step(
            plan, tensors | new | {ROWS: by_columns}, lambda t: t.unflatten(1, (K // 128, -1)).transpose(0, 1)
        )
    inputs = [new[name] for name in (code_writer.AMAX, code_writer.REACH, code_writer.INV_SCALE, ROWS)]
    finish = lower(functools.partial(code_writer.finished_step, True), *inputs).only
    return Lowering(step, finish, _least(case, tensors) + sum(t.nbytes for t in new.values()), across)


def _step(plan: compiled_step.UpdatePlan, tensors: dict[str, Tensor], view: row_views.View) -> LoweredGraph:
    signature, views, sizes = compiled_step.signed(plan, row_views.viewed(tensors, view))
    return lowered_chunk((signature, [(views, sizes)]))[0]


def _least(case: Case, tensors: dict[str, Tensor]) -> int:
    once = (*ONLY_READ, *(("param",) if case.master == "fp32" else ()))
    return sum(t.nbytes * (1 if name in once else 2) for name, t in tensors.items())
