"""What was done to a model: ``explain`` compiles afresh and tells, ``report`` tells of the model that is running."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8compile import store
from fp8compile.report import Report


def report(compiled: nn.Module) -> Report:
    """The report of the graphs compiled so far for ``compiled``, as returned by torch.compile (or compiled in place).

    Raises:
        ValueError: no graph of this model was compiled by fp8compile (yet).
    """
    found = store.compiled_for(compiled)
    if not found:
        raise ValueError("nothing of this model was compiled by fp8compile")
    return Report(tuple(r for c in found for r in c.reports), found[-1].recipe)


def explain(model: Any, args: Any = (), kwargs: Any = None, recipe: Any = None, loss: Any = None) -> Report:
    raise NotImplementedError
