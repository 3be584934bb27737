"""A closure given to ``scaler.step``: evaluated once before the optimizer sees it, so a bad step can be skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8compile.amp.iteration import READY, OptimizerStage


class EvaluatedClosure:
    """The closure the optimizer gets. Its first call returns the loss that is known; a later one (LBFGS) evaluates again.

    Args:
        closure: the user's: zero_grad, forward, ``scaler.scale(loss).backward()``.
        stage: the stage of its optimizer; each evaluation makes gradients that are not unscaled.
        unscale: called after each evaluation.
        bad: says whether the gradients are unusable then.

    Raises:
        FloatingPointError: by a later call whose gradients are inf or NaN: the parameters have moved then.
    """

    def __init__(
        self, closure: Callable[[], Any], stage: OptimizerStage, unscale: Callable[[], None], bad: Callable[[], bool]
    ) -> None:
        self._closure, self._stage, self._unscale, self._bad = closure, stage, unscale, bad
        self._first = [self._evaluate()]

    def _evaluate(self) -> Any:
        self._stage.at = READY
        with torch.enable_grad():
            loss = self._closure()
        self._unscale()
        return loss

    def __call__(self) -> Any:
        if self._first:
            return self._first.pop()
        loss = self._evaluate()
        if self._bad():
            raise FloatingPointError(
                "inf or NaN in the gradients of a closure that the optimizer evaluated again: part of its step is done, so "
                "it cannot be skipped. Use a smaller loss scale or learning rate, or go back to a checkpoint."
            )
        return loss


def taken_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The closure among the arguments of ``step`` (None if there is none), and the other arguments."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs.get("closure"), (), {name: value for name, value in kwargs.items() if name != "closure"}
