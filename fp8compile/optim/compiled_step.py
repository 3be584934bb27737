"""The compiled step: for each parameter a graph which decodes, updates, encodes and writes in place.

Parameters that agree in plan, layout and device share compiled code; how many rows of groups there are is left open
(``open_sizes.py``). On a GPU one launch updates all of them (``one_launch.py``). So parameters may come and go and nothing is
compiled again. Dynamo is not used: its guards cost host time, and its limit on recompilations counts shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.fx.inductor_choices import choosing
from fp8compile.numerics.states.interface import GROUP
from fp8compile.optim.one_launch import Launch, Piece, caught, in_few_launches, offsets_of
from fp8compile.optim.open_sizes import ROWS as OPEN_ROWS
from fp8compile.optim.open_sizes import Fakes, Sizes, TensorLayout, closed, numbers, opened
from fp8compile.optim.plan import Tensors, UpdatePlan, tensors_in_order
from fp8compile.optim.planes import updated
from fp8compile.optim.row_views import FIXED, viewed
from fp8compile.optim.small_parameters import Pieces, pieces_of_all
from fp8compile.optim.step_dump import dump_step
from fp8compile.optim.traced_once import lowered, traced

TUNED_FOR = 2**22  # elements
# Of kernels of several shapes, as what finishes codes of weights is. Inductor's limit on the memory this may cost is for
# intermediates; there are none here.
# A configuration that spills at all is left out, where Inductor's tuner times it up to 16 registers.
# Inductor's patterns are of matmuls and attention, which no update has; looking for them took a twentieth of a first step.
INDUCTOR = {
    "combo_kernels": True,
    "benchmark_combo_kernel": False,
    "combo_kernel_peak_memory_pct_threshold": None,
    "triton.spill_threshold": 0,
    "pattern_matcher": False,
}

Compiled = Callable[[list[Tensor]], Any]
COMPILED: dict[Any, tuple[Callable[..., Any], Fakes]] = {}  # by Signature; grows with layouts, not with shapes


@dataclass(frozen=True)
class Signature:
    """What compiled code depends on: the plan, and the layout of every tensor."""

    plan: UpdatePlan
    layouts: tuple[tuple[str, TensorLayout], ...]

    @property
    def is_on_gpu(self) -> bool:
        return any(layout.device.type == "cuda" for _, layout in self.layouts)

    @property
    def may_share(self) -> bool:
        """Whether its code is generated kernels alone, which can be caught: calls of libraries would run."""
        return self.is_on_gpu and not self.plan.update.whole_tensor


def signed(plan: UpdatePlan, tensors: Tensors) -> tuple[Signature, Tensors, Sizes]:
    """The signature of a piece's update; what code for it takes: the piece's tensors, and the sizes that it leaves open."""
    plan, tensors = _without_offset(plan, tensors)
    sizes, layouts = Sizes(), closed(tensors)
    if plan.by_rows:
        parts = {name: t for name, t in tensors.items() if name not in FIXED}
        left_open, sizes = opened(parts, rows_alone=rows_alone(parts), any_width=plan.any_width)
        layouts |= left_open
    return Signature(plan, tuple(layouts.items())), tensors, sizes


def rows_alone(tensors: Tensors) -> bool:
    """Whether the number of rows alone is left open: a C++ compiler takes twice as long for loops of unknown length."""
    return all(t.device.type == "cpu" for t in tensors.values())


class PreparedStep:
    """The step of some parameters, prepared once: which compiled code takes which tensors.

    Args:
        several: for each parameter its plan and its tensors (see ``UpdatePlan.__call__``), which are held, and updated in
            place.
        compiled: False runs the step operation by operation.
    """

    def __init__(self, several: Sequence[tuple[UpdatePlan, Tensors]], *, compiled: bool) -> None:
        self.launches: list[Launch] = []
        laid = [laid_out(*each) for each in several]
        self._moved = [moved for _, _, moved in laid]
        waiting: dict[Signature, list[Piece]] = {}
        every: list[Pieces] = [[(plan, _whole)] for plan, _, _ in laid]
        if compiled:
            every = pieces_of_all((plan, tensors["param"]) for plan, tensors, _ in laid)
        for index, ((_, tensors, _), found) in enumerate(zip(laid, every, strict=True)):
            for piece_plan, view in found:
                signature, views, sizes = signed(piece_plan, viewed(tensors, view))
                piece = Piece(index, views, sizes, view, offsets_of(views, tensors))
                waiting.setdefault(signature, []).append(piece)
        for signature, alike in waiting.items():
            run = functools.partial(_compiled, signature) if compiled else functools.partial(_eager, signature.plan)
            codes = [run(piece) for piece in alike]
            together, groups = compiled and signature.may_share, signature.plan.groups_of_a_block
            self.launches += in_few_launches(codes, alike, together=together, groups=groups)

    def __call__(self, new: Sequence[Tensors]) -> None:
        """Update every parameter by its gradient, ``grad``, and the other tensors that are new at every step.

        They must have the layouts of the first ones.
        """
        with torch.no_grad():
            if any(self._moved):
                new = [
                    tensors_in_order(each) if moved else each for each, moved in zip(new, self._moved, strict=True)
                ]
            for launch in self.launches:
                launch(new)


def laid_out(plan: UpdatePlan, tensors: Tensors) -> tuple[UpdatePlan, Tensors, bool]:
    """An update on contiguous tensors, and whether they are in another order than the parameter's; as it is where one of
    them would not be contiguous."""
    if plan.channels_last:
        found = tensors_in_order(tensors)
        if all(t.is_contiguous() for name, t in found.items() if name != "grad"):
            return plan.in_order, found, True
    return plan, tensors, False


def _whole(t: Tensor) -> Tensor:
    return t


def _without_offset(plan: UpdatePlan, tensors: Tensors) -> tuple[UpdatePlan, Tensors]:
    """The offset of a piece is in its stream: code for it fits any."""
    if plan.rounds_stochastically and plan.offset:
        stream = tensors["stream"]
        tensors = tensors | {"stream": stream + torch.tensor([0, plan.offset], device=stream.device)}
    return replace(plan, offset=0), tensors


def _compiled(signature: Signature, piece: Piece) -> Compiled:
    """Code for a piece, whose sizes are asked once whether it fits them; code for these sizes alone where it does not."""
    code, fakes = compiled_for(signature, piece.sizes)
    sizes = numbers([piece.sizes])
    if not fakes.fit([piece.sizes]):
        code, _ = compiled_for(replace(signature, layouts=tuple(closed(piece.tensors).items())), {})
        sizes = []
    return lambda tensors: code(*sizes, *tensors)


def compiled_for(signature: Signature, sizes: Sizes) -> tuple[Callable[..., Any], Fakes]:
    if signature not in COMPILED:
        COMPILED[signature] = compile_step(signature, sizes)
    return COMPILED[signature]


def _eager(plan: UpdatePlan, piece: Piece) -> Compiled:
    return lambda tensors: in_place(plan, dict(zip(piece.tensors, tensors, strict=True)))


def in_place(plan: UpdatePlan, tensors: Tensors) -> None:
    """The step as plain torch: compute everything, then write it."""
    made = updated(plan, tensors) if plan.planes > 1 else plan(tensors)
    # The parameter first, as in ``tensors``: codes of a state before it would hold registers meanwhile.
    for name in [name for name in tensors if name in made]:
        tensors[name].copy_(made.pop(name))
    assert not made, f"the update makes {[*made]}, which is not kept"


def compile_step(signature: Signature, sizes: Sizes) -> tuple[Callable[..., Any], Fakes]:
    """Compiled code for a step of parameters, which takes the sizes that are left open and all tensors; and what it fits."""
    rows = TUNED_FOR // GROUP
    tuned_for = {size: rows if size.name == OPEN_ROWS else n for size, n in sizes.items()}
    graph, flat, fakes = traced_step(signature, tuned_for)
    names = [name for name, _ in signature.layouts]
    dump_step(signature.plan, names, lambda: traced_step(signature, tuned_for, decomposed=False)[0])
    with caught() if signature.may_share else nullcontext(), private.inductor_config.patch(inductor_options()):
        compiled = lowered(graph, flat, fakes.mode, with_groups_whole(private.compile_fx_inner))
    return compiled, fakes


def with_groups_whole(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor whose kernels hold a group at once: many parameters may share them (``kernel_text.py``).

    Inductor walks along short groups whose length is left open, where they do not lie side by side (torch 2.11 to 2.15).
    """
    return choosing("should_use_persistent_reduction", _held)(inner_compile)


def _held(theirs: Callable[..., bool], features: Any, cooperative_reduction: bool) -> bool:
    short = private.inductor_virtualized.graph.sizevars.statically_known_leq(features.reduction_numel, GROUP)
    return theirs(features, cooperative_reduction) or bool(short and not cooperative_reduction)


def inductor_options() -> dict[str, Any]:
    """The options in INDUCTOR that this version of torch has."""
    return private.known_options(INDUCTOR)


def traced_step(
    signature: Signature, tuned_for: Sizes, *, decomposed: bool = True
) -> tuple[torch.fx.GraphModule, list[Any], Fakes]:
    """The step as a graph of ATen operations on sizes and tensors, and such a list, of fakes."""
    fakes = Fakes()
    like = fakes.of(dict(signature.layouts), tuned_for)
    flat = [*fakes.sizes, *like.values()]

    def step(*taken: Any) -> tuple[()]:
        in_place(signature.plan, dict(zip(like, taken[len(fakes.sizes) :], strict=True)))
        return ()

    return traced(step, flat, decomposed=decomposed), flat, fakes
