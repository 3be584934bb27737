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
from fp8compile.optim.step_numbers import ParameterRows

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
        parameters: all that it updated.
        states: of all parameters.
        options: of all groups.
        step: what ran.
        places: where its numbers were put.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        states: States,
        options: Options,
        step: PreparedStep,
        places: Sequence[ParameterRows],
    ) -> None:
        self.step, self.places, self._options = step, places, options
        _, self._groups, self._held = zip(*parameters, strict=True)
        plain = all(isinstance(each, dict) for each in states.values())  # others may keep what they like there
        self._simple = plain and all(not is_sharded(p) and p.numel() for p in self._held)
        if self._simple:
            self._states = [*states.values()]
            self._objects = [*self._groups, *self._held, *states, *self._states]
            self._tensors = [*_tensors(self._states)]
            self._layouts = _layouts(self._held, [*map(GRADIENT, self._held)])
        self.leave()

    def leave(self) -> None:
        """Behind a step, which is a change of parameters too; its gradients may go."""
        self.new: list[Tensors] = []
        self._versions = [*map(VERSION, self._held)]

    def goes_on(self, parameters: Sequence[Parameter], states: States, options: Options) -> bool:
        """Whether a step of these is like the last one; ``new`` is then what is new in it, the gradients in their order."""
        if not self._simple or self._options != options:
            return False
        _, groups, held = zip(*parameters, strict=True)
        if not _same([*groups, *held, *states, *states.values()], self._objects):
            return False
        if [*map(VERSION, held)] != self._versions or sum(map(len, self._states)) != len(self._tensors):
            return False
        if not all(map(is_, _tensors(self._states), self._tensors)):
            return False
        gradients = [*map(GRADIENT, held)]
        if not all(map(is_, map(LAYOUT, gradients), repeat(torch.strided))):
            return False
        if _layouts(held, gradients) != self._layouts:
            return False
        self.new = [{"grad": g} for g in gradients]
        return True


def _tensors(states: Sequence[dict[str, Tensor]]) -> Iterator[Tensor]:
    return chain.from_iterable(map(dict.values, states))


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _layouts(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Any]:
    dtypes = map(DTYPE, chain(parameters, gradients))
    return [*dtypes, *map(Tensor.data_ptr, parameters), *map(Tensor.stride, gradients)]
