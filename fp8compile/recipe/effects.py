"""Options of a recipe that change nothing beside its others: refused where they are written.

What a preset brings, a dict of changes leaves as it was, or a field has by default is no wish, and is not judged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")
INTEGERS = ("int8", "int8_blocks")


def _fp8(one: Any) -> bool:
    return one.linear not in ("off", *INTEGERS)


def _delayed(one: Any) -> bool:
    return bool(one.linear != "off" and one.linear_scaling == "delayed")


def _smooth(one: Any) -> bool:
    tensorwise = one.scaling_mode == "tensorwise" and one.linear_scaling == "dynamic"
    return bool(tensorwise and not one.cache_weights)


# By field: whether it can have an effect beside the other fields of one recipe, and what to set so that it has.
NEEDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "linear_formats": (_fp8, "linear='tensorwise' (or another FP8 mode)"),
    "emulate": (lambda one: one.linear != "off", "linear='tensorwise' (or another mode)"),
    "margin": (_delayed, "linear_scaling='delayed' beside FP8 linears"),
    "amax_history_len": (_delayed, "linear_scaling='delayed' beside FP8 linears"),
    "amax_compute": (_delayed, "linear_scaling='delayed' beside FP8 linears"),
    "saved_format": (lambda one: one.saved != "off", "saved='groupwise'"),
    "saved_attention": (lambda one: one.saved != "off", "saved='groupwise'"),
    "attention_format": (
        lambda one: one.saved != "off" and one.saved_attention is not False,
        "saved='groupwise' and saved_attention=True",
    ),
    "merge_dgrads": (
        lambda one: _delayed(one) and one.cache_weights,
        "linear_scaling='delayed' and cache_weights=True beside FP8 linears",
    ),
    "smooth_swiglu": (_smooth, "linear='tensorwise', linear_scaling='dynamic' and cache_weights=False"),
    "hadamard_wgrad": (lambda one: one.linear in INTEGERS, "linear='int8' or 'int8_blocks'"),
    "card_gib": (lambda one: one.memory_budget == "fit", "memory_budget='fit'"),
}


def check_effects(recipe: Any, written: Collection[str]) -> None:
    """Raises ValueError for a field that was written, differs from its default, and has no effect in any module."""
    every = (recipe, *recipe.modules.values())
    for field in dataclasses.fields(recipe):
        name, value = field.name, getattr(recipe, field.name)
        if name not in NEEDS or name not in written or value == field.default:
            continue
        has_effect, cure = NEEDS[name]
        if not any(map(has_effect, every)):
            raise ValueError(f"Recipe.{name}={value!r} has no effect here: set {cure}, or leave {name} out.")


def judged(recipe: type[Kind]) -> type[Kind]:
    """A class of recipes whose constructor judges what it is given, unless that is all fields, as in dataclasses.replace."""
    plain, number = recipe.__init__, len(dataclasses.fields(recipe))  # type: ignore[arg-type]

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **fields: Any) -> None:
        plain(self, *args, **fields)
        if len(fields) < number:
            check_effects(self, fields)

    recipe.__init__ = init  # type: ignore[method-assign]
    return recipe
