"""An optimizer's part in writing codes of weights (``weight_codes=True``): of which, under what, and what is left.

    before a step   known [2] of each weight: as the last step left it, or measured anew if anything has changed since
    the step        codes by rows, inv_scale, and by group amax and reach (step_codes.py)
    behind it       known of the new weight; whether anything was clipped; the codes transposed, where graphs take them so

The codes are transposed by a kernel of their own: the step's kernel holds few rows at a time, and would store them a few
bytes at a time (tests/sm90/test_step_codes_sm90.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile._distributed import is_sharded
from fp8compile.numerics.formats import E4M3
from fp8compile.numerics.states.interface import metadata_shape
from fp8compile.optim.compiled_step import inductor_options
from fp8compile.optim.exchange import WrittenWeight, exchange, seen
from fp8compile.optim.interface import OptimizerShell, Parameter
from fp8compile.optim.plan import Tensors, UpdatePlan
from fp8compile.optim.step_bounds import why_no_bound
from fp8compile.optim.step_codes import AMAX, GROUP, INV_SCALE, KNOWN, REACH, ROWS, Wanted

NEAR = 2.0**-12  # two ways to decode a state agree to this: half of what the bound allows (numerics/step_bounds.py)
TRANSPOSED, CLIPPED = "weight.codes_transposed", "weight.clipped"  # made behind a step, of what it wrote
Finish = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class CodeWriter:
    """What one optimizer remembers of the weights whose codes it writes."""

    def __init__(self, optimizer: OptimizerShell) -> None:
        self._optimizer = optimizer
        self._seen: dict[Tensor, tuple[Any, ...]] = {}

    def wanted(self, p: Tensor, group: Mapping[str, Any]) -> Wanted | None:
        """The codes that the step of ``p`` writes, if any."""
        if not self._optimizer.weight_codes or self.why_not(p, group):
            return None
        return exchange.asked(p)

    def remark(self, p: Tensor, group: Mapping[str, Any]) -> str | None:
        """For the report: whether codes are written, and why not; None without ``weight_codes``."""
        if not self._optimizer.weight_codes:
            return None
        reason = self.why_not(p, group)
        return "written by the step" if reason is None else f"not written: {reason}"

    def why_not(self, p: Tensor, group: Mapping[str, Any]) -> str | None:
        """Why the step of ``p`` writes no codes; None where it does."""
        if is_sharded(p):
            return "it is sharded: graphs take the gathered weight"
        wanted = exchange.asked(p)
        if wanted is None:
            return (
                "no graph has asked for its codes: it is no weight of an FP8 linear with Recipe.linears.cache_weights"
            )
        plan = self._optimizer.plan_of(p, group)
        return why_not_rounded(plan, wanted) or why_no_bound(self._optimizer.plain, group)

    def fresh(self, parameters: list[Parameter]) -> list[Tensors]:
        """For each parameter the tensors that this step takes in addition: new ones, since a backward that is still to come
        keeps the codes of its forward."""
        return [self._fresh(p, group) if self.wanted(p, group) else {} for _, group, p in parameters]

    def _fresh(self, p: Tensor, group: Mapping[str, Any]) -> Tensors:
        known = self._known(p, group)
        exchange.give_up(p)
        return {KNOWN: known, **_written(p)}

    def _known(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The largest magnitude of the weight and the largest reach of its states, as they are before this step."""
        found = exchange.of(p)
        loaded = found is not None and found.wanted is None
        if found is not None and not loaded and self._seen.get(p) == self._as_it_is(p):
            return found.known
        plan = replace(self._optimizer.plan_of(p, group), codes=exchange.asked(p))
        groups = plan.measured({"param": p.detach(), **self._optimizer.state[p]})
        measured = torch.stack([groups[AMAX].amax(), groups[REACH].amax()])
        if found is None or not loaded:
            return measured
        near = (found.known - measured).abs() <= NEAR * measured  # from a checkpoint: to go on to the bit
        return torch.where(near, found.known, measured)

    def _as_it_is(self, p: Tensor) -> tuple[Any, ...]:
        states = self._optimizer.state[p].items()
        return seen(p), *((name, *seen(t)) for name, t in states if name != "step")

    def over(
        self,
        p: Tensor,
        group: Mapping[str, Any],
        made: tuple[Tensor | None, Tensor | None, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Wanted, Tensors] | None:
        """What a graph of forward, backward and update takes in addition, to write the codes of the new weight over ``made``,
        which its forward has read: by rows, transposed, inv_scale, encoded from ``dtype``. None where it writes none."""
        wanted, there = self.wanted(p, group), [codes is not None for codes in made[:2]]
        if wanted is None or [wanted.dtype, wanted.by_rows, wanted.transposed] != [dtype, *there]:
            return None
        known, found = self._known(p, group), exchange.of(p)
        clipped = None if found is None else found.clipped
        if clipped is None:
            clipped = torch.zeros((), dtype=torch.bool, device=p.device)
        every = dict(zip((ROWS, TRANSPOSED, INV_SCALE), made, strict=True)) | {KNOWN: known, CLIPPED: clipped}
        return wanted, {name: tensor for name, tensor in every.items() if tensor is not None}

    def written_over(self, p: Tensor, wanted: Wanted, tensors: Tensors) -> None:
        """Behind that graph: leave what it has written where graphs look for it."""
        codes, transposed = tensors.get(ROWS), tensors.get(TRANSPOSED)
        self._leave(p, wanted, tensors[INV_SCALE], tensors[KNOWN], tensors[CLIPPED], codes, transposed)

    def leave(self, parameters: list[Parameter], fresh: list[Tensors]) -> None:
        """Behind the step: leave what was written where graphs look for it."""
        for (_, _, p), new in zip(parameters, fresh, strict=True):
            wanted = exchange.asked(p)
            if new and wanted is not None:
                finish = finisher(tuple(p.shape), p.device, wanted.transposed, self._optimizer.compiled)
                known, clipped, *across = finish(new[AMAX], new[REACH], new[INV_SCALE], new[ROWS])
                codes = new[ROWS] if wanted.by_rows else None
                self._leave(p, wanted, new[INV_SCALE], known, clipped, codes, across[0] if across else None)

    def _leave(
        self,
        p: Tensor,
        wanted: Wanted,
        inv_scale: Tensor,
        known: Tensor,
        clipped: Tensor,
        codes: Tensor | None,
        transposed: Tensor | None,
    ) -> None:
        mine = id(self._optimizer)
        exchange.leave(p, WrittenWeight(inv_scale, known, seen(p), clipped, wanted, codes, transposed, mine))
        self._seen[p] = self._as_it_is(p)


def why_not_rounded(plan: UpdatePlan, wanted: Wanted) -> str | None:
    """Why the step's kernel does not have the weight as it is stored, and as graphs encode it.

    What is rounded stochastically, or split, it has; FP32 it rounds to BF16 by integer arithmetic. Another cast may be
    dropped by Inductor, and its codes be those of another value.
    """
    rounded = {plan.dtype} if plan.master in ("fp32", "fp16_scaled") else set()
    rounded |= {wanted.dtype} - {plan.dtype, torch.float32}
    if rounded - {torch.bfloat16} or (
        plan.dtype != torch.float32 and wanted.dtype not in (plan.dtype, torch.float32)
    ):
        stored, taken = (str(dtype).removeprefix("torch.") for dtype in (plan.dtype, wanted.dtype))
        return f"the step does not round master={plan.master!r} of {stored} weights to {taken} as graphs do"
    return None


def _written(p: Tensor) -> Tensors:
    groups, empty = (
        metadata_shape(p.shape, GROUP),
        functools.partial(torch.empty, dtype=torch.float32, device=p.device),
    )
    codes = {ROWS: empty(p.shape, dtype=E4M3.dtype), INV_SCALE: empty(1, 1)}
    return codes | {AMAX: empty(groups), REACH: empty(groups)}


def side_by_side(amax: Tensor, reached: Tensor) -> Tensor:
    """What the step has measured by group, ``[2, groups]``."""
    return torch.stack([amax.flatten(), reached.flatten()])


def finished(every: Tensor, inv_scale: Tensor, codes: Tensor) -> tuple[Tensor, ...]:
    """From what the step measured, ``[2, groups]``: ``known`` [2]; and whether a value was clipped."""
    known = every.amax(1)
    return known, known.select(0, 0) > E4M3.max * inv_scale.reshape(())


def finished_and_transposed(every: Tensor, inv_scale: Tensor, codes: Tensor) -> tuple[Tensor, ...]:
    """The same, and the codes ``[N, K]`` transposed, stored row by row."""
    return *finished(every, inv_scale, codes), codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def finished_step(
    transposed: bool, amax: Tensor, reached: Tensor, inv_scale: Tensor, codes: Tensor
) -> tuple[Tensor, ...]:
    """All that is left to do behind a step by itself."""
    fn = finished_and_transposed if transposed else finished
    return fn(side_by_side(amax, reached), inv_scale, codes)


def finisher(shape: tuple[int, ...], device: torch.device, transposed: bool, compiled: bool) -> Finish:
    """What finishes a step: in kernels of Inductor's where the device is a GPU and steps are compiled."""
    if not (compiled and device.type == "cuda"):
        return functools.partial(finished_step, transposed)
    return _generated(shape, device, transposed)


@functools.cache
def _generated(shape: tuple[int, ...], device: torch.device, transposed: bool) -> Finish:
    groups = metadata_shape(shape, GROUP)
    examples = [torch.empty(size, dtype=torch.float32, device=device) for size in (groups, groups, (1, 1))]
    examples.append(torch.empty(shape, dtype=E4M3.dtype, device=device))
    graph = private.make_fx(functools.partial(finished_step, transposed), tracing_mode="fake")(*examples)
    compiled: Any = private.compile_fx(graph, examples, config_patches=inductor_options())
    return cast(Finish, compiled)
