"""The calls of a compiled graph that autograd records: each is handed on with its arguments, its results and its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fp8compile import _torch as private


def on_recorded_call(
    compiled: Callable[..., Any], begin: Callable[[tuple[Any, ...], Any, Any], None]
) -> Callable[..., Any]:
    """``compiled``, which calls ``begin(args, results, backward)`` after each call whose backward autograd will run.

    ``backward`` is the graph's own autograd node: hooks on it run when its backward runs.
    """

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        before = private.producers(args)
        results = compiled(*args)
        backward = private.compiled_backward(results, before)
        if backward is not None:
            begin(args, results, backward)
        return results

    return run
