"""What each field of a recipe may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8compile._messages import nearest
from fp8compile.numerics.few_bits import FEW_BITS, TOGETHER
from fp8compile.planning.device_rates import RATES
from fp8compile.recipe.calibration import Calibration
from fp8compile.recipe.frozen import FrozenMapping
from fp8compile.recipe.in_a_file import InAFile
from fp8compile.recipe.linear_formats import FrozenFormats, as_formats
from fp8compile.recipe.saved_bits import SavedBits

CHOICES: Mapping[str, tuple[str, ...]] = {
    "linear": ("off", "tensorwise", "rowwise", "blockwise", "mxfp8", "int8", "int8_blocks", "auto"),
    "device_rates": ("device", *RATES),
    "linear_formats": ("hybrid", "e4m3"),
    "linear_scaling": ("dynamic", "delayed"),
    "amax_compute": ("max", "most_recent"),
    "saved": ("groupwise", "off"),
    "collectives": ("off", "groupwise"),
    "offload": ("off", "auto", "all"),
    "saved_format": ("auto", "e4m3", "int8", "best_of_two", *FEW_BITS),
    "attention_format": ("auto", "e4m3", "int8", "best_of_two", *FEW_BITS),
    "codegen": ("inductor", "eager"),
    "check": ("off", "first_step"),
}

# What a scale of each mode of ``linear`` is of, other than a tensor.
SCALES_OF = {
    **{"rowwise": "row", "blockwise": "block of 1x128 or 128x128", "mxfp8": "block of 1x32"},
    **{"int8": "row", "int8_blocks": "block of 32x32"},
}
IN_BLOCKS = ("blockwise", "mxfp8", "int8_blocks")

OBSERVE = SAVED_ATTENTION = ("auto", True, False)

ISLANDS = ("auto", "policy", "off")

BOOLEANS = ("emulate", "cache_weights", "merge_dgrads", "smooth_swiglu", "hadamard_wgrad")

COUNTS = {"group_size": (16, 65536), "amax_history_len": (1, 1024), "margin": (0, 8)}


class FrozenOptions(FrozenMapping):
    """Inductor options, hashable."""

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return repr(dict(sorted(self.items())))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f'Recipe.{name} must be module path patterns such as ("layers.0.*",), not {value!r}.')
    return tuple(patterns)


def _as_islands(name: str, value: Any) -> Any:
    """One of ISLANDS, or a calibration: ``value`` itself, or loaded from its file."""
    cure = f"{nearest(str(value), ISLANDS)} Or a calibration (fp8compile.calibrate), or the path of one (.json)."
    return _or_in_a_file(name, value, ISLANDS, Calibration, cure)


def _as_saved_bits(name: str, value: Any) -> Any:
    """ "off", or a choice of bits: ``value`` itself, or loaded from its file."""
    cure = (
        " It is 'off', a choice of bits (fp8compile.tools.calibrate_bits(...).saved_bits), or the path of one (.json). "
        "One number of bits for all is Recipe.saved_format, such as '4bit'."
    )
    return _or_in_a_file(name, value, ("off",), SavedBits, cure)


def _or_in_a_file(name: str, value: Any, plain: Sequence[str], kind: type[InAFile], cure: str) -> Any:
    """One of the plain values, or one of a kind: itself, or loaded from its file."""
    if isinstance(value, kind) or value in plain:
        return value
    if isinstance(value, str) and value.endswith(".json"):
        return kind.load(value)
    raise ValueError(f"Recipe.{name} cannot be {value!r}.{cure}")


def _as_options(name: str, value: Any) -> FrozenOptions:
    if not isinstance(value, Mapping):
        raise ValueError(f"Recipe.{name} must be a dict of Inductor options, not {value!r}.")
    return FrozenOptions(value)


# How a field that may be written in several ways is kept.
CONVERTED: Mapping[str, Callable[[str, Any], Any]] = {
    "skip": _as_patterns,
    "linear_skip": _as_patterns,
    "keep_fp32": _as_patterns,
    "linear_formats": lambda _, value: as_formats(value),
    "islands": _as_islands,
    "saved_bits": _as_saved_bits,
    "inductor": _as_options,
}


def check_values(recipe: Any) -> None:
    """Raises ValueError for a value that a field of a recipe cannot have, naming it and the nearest right one."""
    for name, allowed in CHOICES.items():
        value = getattr(recipe, name)
        if value not in allowed and not (name == "linear_formats" and isinstance(value, FrozenFormats)):
            raise ValueError(f"Recipe.{name} cannot be {value!r}.{nearest(str(value), allowed)}")
    for name, choices in (("observe", OBSERVE), ("saved_attention", SAVED_ATTENTION)):
        value = getattr(recipe, name)
        if value not in choices or isinstance(value, int) != isinstance(value, bool):
            raise ValueError(f"Recipe.{name} must be 'auto', True or False, not {value!r}.")
    for name in BOOLEANS:
        if not isinstance(getattr(recipe, name), bool):
            raise ValueError(f"Recipe.{name} must be True or False, not {getattr(recipe, name)!r}.")
    for name, (low, high) in COUNTS.items():
        value = getattr(recipe, name)
        if not _is_int(value) or not low <= value <= high:
            raise ValueError(f"Recipe.{name} must be an integer from {low} to {high}, not {value!r}.")
    if recipe.chunk_logits not in ("off", "auto") and not (
        _is_int(recipe.chunk_logits) and 2 <= recipe.chunk_logits <= 64
    ):
        raise ValueError(
            f"Recipe.chunk_logits must be 'off', 'auto' or a number of chunks from 2 to 64, not {recipe.chunk_logits!r}."
        )
    chosen = () if recipe.saved_bits == "off" else recipe.saved_bits.formats
    few = {recipe.saved_format, recipe.attention_format, *chosen} & {*FEW_BITS}
    if recipe.group_size % TOGETHER and few:
        nearest_size = recipe.group_size // TOGETHER * TOGETHER
        raise ValueError(
            f"Recipe.group_size must be a multiple of {TOGETHER} for {min(few)!r}, such as {nearest_size}, "
            f"not {recipe.group_size!r}."
        )
    _check_scales(recipe)
    _check_budget(recipe.memory_budget, recipe.card_gib)
    if not _is_int(recipe.min_saved_numel) or recipe.min_saved_numel < 0:
        raise ValueError(f"Recipe.min_saved_numel must be a number of elements >= 0, not {recipe.min_saved_numel!r}.")
    if recipe.dump is not None and not isinstance(recipe.dump, str):
        raise ValueError(f"Recipe.dump must be the path of a folder, not {recipe.dump!r}.")


def _check_budget(budget: object, card_gib: object) -> None:
    if card_gib is not None and not (_is_number(card_gib) and card_gib > 0):  # type: ignore[operator]
        raise ValueError(f"Recipe.card_gib must be the memory of the device in GiB, such as 80, not {card_gib!r}.")
    if budget == "fit":
        if card_gib is None:
            raise ValueError(
                "Recipe.memory_budget='fit' has to know the device's memory: set Recipe.card_gib, such as 80."
            )
        return
    whole = _is_int(budget) and budget >= 2  # type: ignore[operator]
    if not whole and not (_is_number(budget) and 0 <= budget <= 1):  # type: ignore[operator]
        raise ValueError(
            f"Recipe.memory_budget must be a fraction of the default's peak, 0.0 ... 1.0, or bytes, an integer from 2, "
            f"or 'fit', not {budget!r}."
        )


def _check_scales(recipe: Any) -> None:
    """What needs one scale per tensor."""
    has = f"Recipe.linear={recipe.linear!r} has one per {SCALES_OF.get(recipe.linear)}. Set linear='tensorwise'"
    if recipe.linear_scaling == "delayed" and recipe.linear in SCALES_OF:
        raise ValueError(
            f"Recipe.linear_scaling='delayed' keeps one scale per tensor, and {has}, or linear_scaling='dynamic'."
        )
    if recipe.cache_weights and recipe.linear in IN_BLOCKS:
        raise ValueError(f"Recipe.cache_weights keeps one scale per weight, and {has}, or cache_weights=False.")
