"""A step like the one before: that nothing has changed is seen in a few us a parameter, and nothing else is looked at.

Compared are the objects and addresses of parameters and states, the versions of parameters (edits by others), the layouts
of gradients, and the options of groups.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile._distributed import is_sharded, local_part
from fp8compile.optim.compiled_step import PreparedStep
from fp8compile.optim.interface import Parameter
from fp8compile.optim.plan import Tensors
from fp8compile.optim.step_numbers import ParameterRows

Options = Mapping[int, tuple[Any, ...]]  # by group
States = Mapping[Tensor, Mapping[str, Tensor]]


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
        self.step, self.places, self._options, self._held = step, places, options, parameters
        simple = all(not is_sharded(p) and p.numel() for _, _, p in parameters)
        self._seen = [self._look(group, p, states[p]) for _, group, p in parameters] if simple else None
        self.leave()

    @staticmethod
    def _look(group: Mapping[str, Any], p: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
        g = p.grad
        assert g is not None
        return p, group, [*state.values()], p.dtype, p.data_ptr(), g.dtype, g.stride()

    def leave(self) -> None:
        """Behind a step, which is a change of parameters too; its gradients may go."""
        self.new: list[Tensors] = []
        self._versions = [p._version for _, _, p in self._held]

    def goes_on(self, parameters: Sequence[Parameter], states: States, options: Options) -> bool:
        """Whether a step of these is like the last one; ``new`` is then what is new in it, the gradients in their order."""
        self.new = []
        if self._seen is None or len(parameters) != len(self._seen) or self._options != options:
            return False
        strided, same, new = torch.strided, operator.is_, self.new
        for (_, group, p), seen, version in zip(parameters, self._seen, self._versions, strict=True):
            known, its_group, held, dtype, address, g_dtype, stride = seen
            g, here = p.grad, states.get(p)
            if p is not known or group is not its_group or g is None or p._version != version:
                return False
            if p.data_ptr() != address or g.layout is not strided or g.stride() != stride:
                return False
            if p.dtype is not dtype or g.dtype is not g_dtype or here is None:
                return False
            if len(here) != len(held) or not all(map(same, here.values(), held)):
                return False
            new.append({"grad": g})
        return True
