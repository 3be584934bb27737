"""fp8compile: ``torch.compile(model, backend="fp8compile")``, low-precision training that needs no change to the model."""

from __future__ import annotations

from fp8compile._version import __version__, check_torch

check_torch()

from fp8compile import amp, optim  # noqa: E402
from fp8compile.observe.overflow_report import OverflowReport, overflow_report  # noqa: E402
from fp8compile.optim import compress, decompress  # noqa: E402
from fp8compile.recipe.calibration import Calibration  # noqa: E402
from fp8compile.recipe.recipe import Recipe  # noqa: E402
from fp8compile.reporting.memory import Fit  # noqa: E402
from fp8compile.reporting.report import Report  # noqa: E402
from fp8compile.tools.calibrate import calibrate  # noqa: E402
from fp8compile.tools.checking.check import Check, check  # noqa: E402
from fp8compile.tools.debug_step import debug_step  # noqa: E402
from fp8compile.tools.explain import explain, report  # noqa: E402
from fp8compile.tools.first_non_finite import FirstNonFinite  # noqa: E402
from fp8compile.tools.set_recipe import set_recipe  # noqa: E402

__all__ = [
    "Calibration",
    "Check",
    "FirstNonFinite",
    "Fit",
    "OverflowReport",
    "Recipe",
    "Report",
    "__version__",
    "amp",
    "calibrate",
    "check",
    "compress",
    "debug_step",
    "decompress",
    "explain",
    "optim",
    "overflow_report",
    "report",
    "set_recipe",
]
