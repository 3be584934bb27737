"""Gradient release: a parameter is updated in the backward as soon as its gradient is complete, and the gradient is dropped.

So no two gradients need be alive at once. Methods that need all gradients at once do not work with it: clipping by their
norm, a loss scaler that skips steps, accumulation over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fp8compile.optim.interface import OptimizerShell


class Release:
    """An active gradient release; ``remove()`` ends it."""

    def __init__(self, hooks: list[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def release_gradients(optimizer: OptimizerShell, model: nn.Module | None) -> Release:
    """Hook the optimizer's parameters, or those among them that are ``model``'s.

    Raises:
        ValueError: none of the model's parameters is in the optimizer.
    """
    wanted = None if model is None else {id(p) for p in model.parameters()}
    hooked = [each for each in optimizer._parameters() if wanted is None or id(each[2]) in wanted]
    hooked = [each for each in hooked if each[2].requires_grad]
    if not hooked:
        raise ValueError("no parameter of the model is in this optimizer: give the model that it was built for")
    hooks = [each[2].register_post_accumulate_grad_hook(_update(optimizer, each)) for each in hooked]  # type: ignore[no-untyped-call]
    return Release(hooks)


def _update(optimizer: OptimizerShell, each: tuple[int, dict[str, Any], Tensor]) -> Callable[[Tensor], None]:
    def update(p: Tensor) -> None:
        optimizer.update_parameters([each])
        p.grad = None

    return update
