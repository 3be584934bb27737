"""fp8compile: ``torch.compile(model, backend="fp8compile")``, low-precision training that needs no change to the model.

Importing it takes milliseconds. A public name brings its module, and torch, where it is first used (PEP 562). For type
checkers the same names stand in ``__init__.pyi``.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fp8compile._version import __version__, check_torch

check_torch()

_HOMES = {  # a public name, and the module that defines it or that it is
    "Recipe": "fp8compile.recipe.recipe",
    "amp": "fp8compile.amp",
    "calibrate": "fp8compile.tools.calibrate",
    "check": "fp8compile.tools.checking.check",
    "compile_blocks": "fp8compile.tools.compile_blocks",
    "declare": "fp8compile.analysis.sensitivity.declared",
    "explain": "fp8compile.tools.explain",
    "mark_head": "fp8compile.compiler.running_model",
    "optim": "fp8compile.optim",
    "report": "fp8compile.tools.explain",
    "set_recipe": "fp8compile.tools.set_recipe",
    "train_step": "fp8compile.whole_step.step",
}

_ROOMS = ("extras", "integrations", "tools")  # for users too: beside the backend, by trainer, for one question

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = importlib.import_module(_HOMES[name])
        found = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
        globals()[name] = found  # from now on without this function
        return found
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # a room
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and the rooms behind them, whatever has been imported so far."""
    return sorted({*__all__, *_ROOMS, *(name for name in globals() if name.startswith("__"))})
