"""A step like the one before: that nothing has changed is seen in a us a parameter, and nothing else is looked at.

Compared are the objects and addresses of parameters and states, the versions of parameters (edits by others), the layouts
of gradients, and the options of groups: each of all parameters at once, which Python does without a loop of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from fp8compile._distributed import is_sharded, local_part
from fp8compile.optim.compiled_step import PreparedStep
from fp8compile.optim.interface import Parameter
from fp8compile.optim.plan import Tensors
from fp8compile.optim.step_numbers import ParameterRows, StepNumbers, count

Options = Mapping[int, tuple[Any, ...]]  # by group
States = Mapping[Tensor, dict[str, Tensor]]
GRADIENT, VERSION, DTYPE, LAYOUT = map(attrgetter, ("grad", "_version", "dtype", "layout"))


def layout_of(p: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What a prepared step relies on: the same tensor objects of parameter and state, and the gradient's layout."""
    here, g = (local_part(p), local_part(p.grad)) if is_sharded(p) else (p, p.grad)  # type: ignore[arg-type]
    assert g is not None
    return id(p), p.dtype, here.data_ptr(), g.dtype, g.stride(), *map(id, state.values())


class Steady:
    """The last step.

    Args:
        groups: of the optimizer.
        parameters: all that it updated, which are all that have a gradient.
        states: of all parameters.
        options: of all groups.
        step: what ran.
        places: where its numbers were put.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[Parameter],
        states: States,
        options: Options,
        step: PreparedStep,
        places: Sequence[ParameterRows],
    ) -> None:
        self._step, self._places, self._options = step, places, options
        self._held, every = [p for _, _, p in parameters], [*_every(groups)]
        self._missing = [p.grad is None for p in every]
        plain = all(isinstance(each, dict) for each in states.values())  # others may keep what they like there
        self._simple = plain and all(not is_sharded(p) and p.numel() for p in self._held)
        if self._simple:
            self._states = [*states.values()]
            self._objects, self._sizes = [*every, *states, *self._states], _sizes(groups)
            self._tensors = [*_tensors(self._states)]
            self._layouts = _layouts(self._held, [*map(GRADIENT, self._held)])
        self._leave()

    @torch.no_grad()
    def __call__(self, numbers: StepNumbers) -> None:
        """The step again, where it goes on."""
        numbers.again(self._places)
        count(self._places)
        self._step(self._new)
        self._leave()
        numbers.leave()

    def _leave(self) -> None:
        """Behind a step, which is a change of parameters too; its gradients may go."""
        self._new: list[Tensors] = []
        self._versions = [*map(VERSION, self._held)]

    def goes_on(self, groups: Sequence[Mapping[str, Any]], states: States, options: Options) -> bool:
        """Whether a step of all parameters that have a gradient is like the last one."""
        if not self._simple or self._options != options or _sizes(groups) != self._sizes:
            return False
        every = [*_every(groups)]
        if not _same([*every, *states, *states.values()], self._objects):
            return False
        if [*map(VERSION, self._held)] != self._versions or sum(map(len, self._states)) != len(self._tensors):
            return False
        if not all(map(is_, _tensors(self._states), self._tensors)):
            return False
        found = [*map(GRADIENT, every)]
        if [*map(is_, found, repeat(None))] != self._missing:
            return False
        gradients = [g for g in found if g is not None]
        if not all(map(is_, map(LAYOUT, gradients), repeat(torch.strided))):
            return False
        if _layouts(self._held, gradients) != self._layouts:
            return False
        self._new = [{"grad": g} for g in gradients]
        return True


def _every(groups: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _tensors(states: Sequence[dict[str, Tensor]]) -> Iterator[Tensor]:
    return chain.from_iterable(map(dict.values, states))


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _layouts(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Any]:
    dtypes = map(DTYPE, chain(parameters, gradients))
    return [*dtypes, *map(Tensor.data_ptr, parameters), *map(Tensor.stride, gradients)]
