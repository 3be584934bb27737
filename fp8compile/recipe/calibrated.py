"""Whether a calibration fits this recipe: both must say the same about what runs in FP32."""

from __future__ import annotations

from typing import Any

from fp8compile.recipe.calibration import RECALIBRATE, Calibration
from fp8compile.recipe.recipe import Recipe

FIELDS = {"keep_fp32": "fp32.keep", "modules": "modules"}  # of a calibration, and where a recipe has them


def check_calibration(calibration: Calibration, recipe: Recipe) -> None:
    """Raise ValueError if ``recipe`` asks for something else in FP32 than the recipe of the calibration did."""
    for name, new in fp32_fields(recipe).items():
        if new != (old := getattr(calibration, name)):
            raise ValueError(
                f"this calibration is older than the recipe: it was made with {name}={_written(old)}, and "
                f"Recipe.{FIELDS[name]} is {_written(new)}. {RECALIBRATE[:-1]}, recipe=...)."
            )


def fp32_fields(recipe: Recipe) -> dict[str, Any]:
    """``keep_fp32`` and ``modules`` of a recipe, as a ``Calibration`` has them."""
    own = recipe.fp32.keep
    return {
        "keep_fp32": own,
        "modules": tuple((p, r.fp32.keep) for p, r in recipe.modules.items() if r.fp32.keep != own),
    }


def _written(value: Any) -> str:
    is_modules = value and isinstance(value[0], tuple)
    return repr({pattern: {"fp32.keep": kept} for pattern, kept in value} if is_modules else value)
