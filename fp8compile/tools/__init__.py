"""What a user does with a model beside training it; what has a public name of its own is in ``fp8compile`` itself.

calibrate_bits     bits for each saved value, chosen by measurement
debug_step         the first operation of a step whose result is not finite
overflow_report    how far values and gradients are from FP16's limits
scaling_state      what delayed scaling remembers of a model
tune               recipes measured side by side on your device, and the best of them
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {  # a name, and the module that defines it
    "calibrate_bits": "fp8compile.tools.choosing_bits",
    "debug_step": "fp8compile.tools.debugging",
    "overflow_report": "fp8compile.observe.overflow_report",
    "scaling_state": "fp8compile.linears.state",
    "tune": "fp8compile.tools.tuning.tune",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """A tool, and the module that it is in, where it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
