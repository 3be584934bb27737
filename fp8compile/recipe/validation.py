"""What each field of a recipe may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8compile._messages import nearest
from fp8compile.cost.device_rates import RATES
from fp8compile.numerics.few_bits import FEW_BITS, TOGETHER
from fp8compile.recipe.calibration import Calibration
from fp8compile.recipe.frozen import FrozenMapping
from fp8compile.recipe.in_a_file import InAFile
from fp8compile.recipe.linear_formats import FrozenFormats, as_formats
from fp8compile.recipe.saved_bits import SavedBits

CHOICES: Mapping[str, tuple[str, ...]] = {
    "linears.mode": ("off", "tensorwise", "rowwise", "blockwise", "mxfp8", "int8", "auto"),
    "debug.device_rates": ("device", *RATES),
    "linears.formats": ("hybrid", "e4m3"),
    "linears.scaling": ("dynamic", "delayed"),
    "collectives": ("off", "groupwise"),
    "memory.offload": ("off", "auto", "all"),
    "saved.format": ("off", "exact", "auto", "e4m3", "int8", *FEW_BITS),
    "saved.attention_format": ("auto", "e4m3", "int8", *FEW_BITS),
    "debug.codegen": ("inductor", "eager"),
    "debug.check": ("off", "first_step"),
}

# What a scale of each mode of ``linears`` is of, other than a tensor.
SCALES_OF = {
    **{"rowwise": "row", "blockwise": "block of 1x128 or 128x128", "mxfp8": "block of 1x32", "int8": "row"},
}
IN_BLOCKS = ("blockwise", "mxfp8")

OR_AUTO = ("fp32.observe",)  # "auto", True or False

ISLANDS = ("auto", "policy", "off")

BOOLEANS = (
    *(f"linears.{name}" for name in ("emulate", "cache_weights", "merge_dgrads", "smooth_swiglu")),
    "saved.attention",
)

COUNTS = {"saved.group_size": (16, 65536), "linears.amax_history_len": (1, 1024), "linears.margin": (0, 8)}


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


def as_patterns(name: str, value: Any) -> tuple[str, ...]:
    """A pattern, or several."""
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
        " It is 'off', a choice of bits (fp8compile.tools.calibrate_bits(...).saved.bits), or the path of one (.json). "
        "One number of bits for all is Recipe.saved.format, such as '4bit'."
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


def _is_chunks(value: object) -> bool:
    return value in ("off", "auto") or (_is_int(value) and 2 <= value <= 64)  # type: ignore[operator]


def _is_cost(value: object) -> bool:
    return value in ("auto", "any") or (_is_number(value) and 0.0 <= value < float("inf"))  # type: ignore[operator]


# Fields that are neither a choice nor a count: what they may be, and how that is said.
OTHERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "memory.chunk_logits": (_is_chunks, "'off', 'auto' or a number of chunks from 2 to 64"),
    "saved.max_cost": (_is_cost, "'auto', 'any', or a share of a value's worth >= 0.0"),
    "saved.min_numel": (lambda value: _is_int(value) and value >= 0, "a number of elements >= 0"),
    "debug.dump": (lambda value: value is None or isinstance(value, str), "the path of a folder"),
}

# How a field that may be written in several ways is kept.
CONVERTED: Mapping[str, Callable[[str, Any], Any]] = {
    "linears.skip": as_patterns,
    "fp32.keep": as_patterns,
    "linears.formats": lambda _, value: as_formats(value),
    "fp32.islands": _as_islands,
    "saved.bits": _as_saved_bits,
    "debug.inductor": _as_options,
}


def check_fields(group: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that a field of a group cannot have, naming it and the nearest right one.

    ``group`` is "" for fields of the recipe itself.
    """
    for field, value in values.items():
        name = f"{group}.{field}" if group else field
        if name in CHOICES and value not in CHOICES[name] and not isinstance(value, FrozenFormats):
            raise ValueError(f"Recipe.{name} cannot be {value!r}.{nearest(str(value), CHOICES[name])}")
        if name in OR_AUTO and (
            value not in ("auto", True, False) or isinstance(value, int) != isinstance(value, bool)
        ):
            raise ValueError(f"Recipe.{name} must be 'auto', True or False, not {value!r}.")
        if name in BOOLEANS and not isinstance(value, bool):
            raise ValueError(f"Recipe.{name} must be True or False, not {value!r}.")
        low, high = COUNTS.get(name, (0, 0))
        if name in COUNTS and not (_is_int(value) and low <= value <= high):
            raise ValueError(f"Recipe.{name} must be an integer from {low} to {high}, not {value!r}.")
        if name in OTHERS and not OTHERS[name][0](value):
            raise ValueError(f"Recipe.{name} must be {OTHERS[name][1]}, not {value!r}.")


def check_few_bits(group_size: int, formats: tuple[str, ...], bits: Any) -> None:
    """Codes of few bits are packed together, so groups of them have whole packs."""
    few = {*formats, *(() if bits == "off" else bits.formats)} & {*FEW_BITS}
    if group_size % TOGETHER and few:
        raise ValueError(
            f"Recipe.saved.group_size must be a multiple of {TOGETHER} for {min(few)!r}, such as "
            f"{group_size // TOGETHER * TOGETHER}, not {group_size!r}."
        )


def check_budget(budget: object, card_gib: object) -> None:
    """A peak of memory: a fraction, bytes, or what a card has left."""
    if card_gib is not None and not (_is_number(card_gib) and card_gib > 0):  # type: ignore[operator]
        raise ValueError(
            f"Recipe.memory.card_gib must be the memory of the device in GiB, such as 80, not {card_gib!r}."
        )
    if budget == "fit":
        if card_gib is None:
            raise ValueError(
                "Recipe.memory.budget='fit' has to know the device's memory: set Recipe.memory.card_gib, such as 80."
            )
        return
    whole = _is_int(budget) and budget >= 2  # type: ignore[operator]
    if not whole and not (_is_number(budget) and 0 <= budget <= 1):  # type: ignore[operator]
        raise ValueError(
            f"Recipe.memory.budget must be a fraction of the default's peak, 0.0 ... 1.0, or bytes, an integer from 2, "
            f"or 'fit', not {budget!r}."
        )


def check_scales(mode: str, scaling: str, cache_weights: bool) -> None:
    """What needs one scale per tensor."""
    has = f"Recipe.linears.mode={mode!r} has one per {SCALES_OF.get(mode)}. Set linears.mode='tensorwise'"
    if scaling == "delayed" and mode in SCALES_OF:
        raise ValueError(
            f"Recipe.linears.scaling='delayed' keeps one scale per tensor, and {has}, or linears.scaling='dynamic'."
        )
    if cache_weights and mode in IN_BLOCKS:
        raise ValueError(
            f"Recipe.linears.cache_weights keeps one scale per weight, and {has}, or linears.cache_weights=False."
        )
