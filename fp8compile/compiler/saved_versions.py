"""The check that eager makes, for encoded tensors too: the caller must not change a saved value before the backward.

    y = f(x)              the graph keeps codes of x or y for its backward, not the tensor
    y.mul_(2)             eager: "one of the variables needed for gradient computation has been modified ..."
    y.sum().backward()

Autograd compares the version of each saved tensor. Codes have versions of their own, which nobody changes. So the versions of
inputs and results that are stored as codes are noted at the call, and compared before the backward runs. The references to
these tensors are weak, since storing codes is meant to free them. A tensor that is gone cannot have been changed in any way
that could be noticed, and its codes hold its value.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fp8compile.compiler.recorded_calls import on_recorded_call
from fp8compile.reporting.compiled_graph import GraphReport

INPUT, OUTPUT = "input", "output"

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}], {} {} of a "
    "graph compiled by fp8compile, is at version {}; expected version {} instead"
)

Noted = tuple[str, int, weakref.ref[Tensor], int]


def check_versions(compiled: Callable[..., Any], reports: Iterable[GraphReport]) -> Callable[..., Any]:
    """``compiled``, which raises in its backward where eager does; itself where no input or result is stored as codes."""
    kept = sorted({s.belongs_to for report in reports for s in report.notes.saved if s.belongs_to})
    if not kept:
        return compiled
    places = [(what, int(index)) for what, index in (each.split() for each in kept)]

    def note(args: Any, results: Any, backward: Any) -> None:
        noted = _noted(places, {INPUT: args, OUTPUT: results})
        backward.register_prehook(functools.partial(_compare, noted))

    return on_recorded_call(compiled, note)


def _noted(places: Sequence[tuple[str, int]], values: dict[str, Any]) -> list[Noted]:
    found = ((what, index, values[what][index]) for what, index in places if index < len(values[what]))
    return [(what, i, weakref.ref(t), t._version) for what, i, t in found if isinstance(t, Tensor)]


def _compare(noted: Sequence[Noted], gradients: Any) -> None:
    """Raises RuntimeError, as autograd does, for a tensor whose version is not the noted one."""
    for what, index, ref, version in noted:
        tensor = ref()
        if tensor is not None and tensor._version != version:
            kind, shape = tensor.type(), list(tensor.shape)
            raise RuntimeError(MODIFIED.format(kind, shape, what, index, tensor._version, version))
