"""fp8compile: ``torch.compile(model, backend="fp8compile")``, low-precision training that needs no change to the model."""

from __future__ import annotations

from fp8compile.versions import __version__, check_torch

check_torch()

from fp8compile import amp, optim  # noqa: E402
from fp8compile.explain import explain, report  # noqa: E402
from fp8compile.memory import Fit  # noqa: E402
from fp8compile.optim import compress, decompress  # noqa: E402
from fp8compile.recipe import Recipe  # noqa: E402
from fp8compile.report import Report  # noqa: E402
from fp8compile.set_recipe import set_recipe  # noqa: E402

__all__ = [
    "Fit",
    "Recipe",
    "Report",
    "__version__",
    "amp",
    "compress",
    "decompress",
    "explain",
    "optim",
    "report",
    "set_recipe",
]
