"""Options of a recipe that change nothing beside its others: refused where they are written.

What a preset brings, a dict of changes leaves as it was, or a field has by default is no wish, and is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8compile.recipe.changes import FIELDS


def _fp8(one: Any) -> bool:
    return one.linears.mode not in ("off", "int8")


def _delayed(one: Any) -> bool:
    return bool(one.linears.mode != "off" and one.linears.scaling == "delayed")


def _smooth(one: Any) -> bool:
    tensorwise = one.scaling_mode == "tensorwise" and one.linears.scaling == "dynamic"
    return bool(tensorwise and not one.linears.cache_weights)


def _rounds(one: Any) -> bool:
    return bool(one.saved.rounds)


def _rewrites(one: Any) -> bool:
    return bool(one.saved.format != "off" or one.linears.mode != "off")


DELAYED = "linears.scaling='delayed' beside FP8 linears"
STORED = "saved.format='auto' (or another with codes)"

# By field: whether it can have an effect beside the other fields of one recipe, and what to set so that it has.
NEEDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "linears.formats": (_fp8, "linears.mode='tensorwise' (or another FP8 mode)"),
    "linears.emulate": (lambda one: one.linears.mode != "off", "linears.mode='tensorwise' (or another mode)"),
    "linears.margin": (_delayed, DELAYED),
    "linears.amax_history_len": (_delayed, DELAYED),
    "saved.bits": (_rounds, STORED),
    "saved.max_cost": (_rewrites, f"{STORED}, or FP8 linears"),
    "saved.attention": (_rounds, STORED),
    "saved.attention_format": (
        lambda one: _rounds(one) and one.saved.attention,
        f"{STORED} and saved.attention=True",
    ),
    "linears.merge_dgrads": (
        lambda one: _delayed(one) and one.linears.cache_weights,
        "linears.scaling='delayed' and linears.cache_weights=True beside FP8 linears",
    ),
    "linears.smooth_swiglu": (
        _smooth,
        "linears.mode='tensorwise', linears.scaling='dynamic' and linears.cache_weights=False",
    ),
    "memory.card_gib": (lambda one: one.memory.budget == "fit", "memory.budget='fit'"),
}


def check_effects(recipe: Any, written: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that was written, differs from its default, and has no effect in any module."""
    every = (recipe, *recipe.modules.values())
    for name, (has_effect, cure) in NEEDS.items():
        value = recipe.get(name)
        if name in written and value != FIELDS[name] and not any(map(has_effect, every)):
            field = name.partition(".")[2]
            raise ValueError(f"Recipe.{name}={value!r} has no effect here: set {cure}, or leave {field} out.")
