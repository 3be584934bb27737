"""Choices that Inductor makes of kernels, and what these load, made otherwise while a graph is compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fp8compile import _torch as private


@contextmanager
def choosing(name: str, choice: Callable[..., Any]) -> Iterator[None]:
    """Inductor chooses by ``choice(theirs, ...)``, which is given the method of this name that it would call."""
    theirs = private.inductor_virtualized.choices
    ours: Any = copy.copy(theirs)
    setattr(ours, name, functools.partial(choice, getattr(theirs, name)))
    with private.inductor_virtualized.set_choices_handler(ours):
        yield


@contextmanager
def loading(load: Callable[..., Any]) -> Iterator[None]:
    """Kernels for a GPU load by ``load(theirs, kernel, name, index)``, which is given Inductor's own."""
    kernels: Any = private.TritonKernel
    theirs = kernels.load

    def loaded(kernel: Any, name: str, index: Any) -> Any:
        return load(theirs, kernel, name, index)

    kernels.load = loaded
    try:
        yield
    finally:
        kernels.load = theirs
