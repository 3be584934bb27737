"""A compilation that asks a test what may be one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.compiler.row_kernels import fusing_only_where


def compiled_asking(allowed: Callable[[Any, Any, Any], bool], fn: Callable[..., Any], *args: Tensor) -> None:
    """Compile ``fn`` anew and call it; Inductor fuses two nodes only where ``allowed(scheduler, first, second)``."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        with fusing_only_where(allowed):
            return private.compile_fx_inner(*args, **kwargs)

    options = {"force_disable_caches": True}
    torch.compile(fn, backend=functools.partial(private.compile_fx, inner_compile=inner, config_patches=options))(
        *args
    )
