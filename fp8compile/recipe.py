"""The recipe: a frozen value that says what is stored and computed in which format. Nothing else changes results."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CHOICES: Mapping[str, tuple[str, ...]] = {
    "linear": ("off", "tensorwise", "rowwise"),
    "linear_formats": ("hybrid", "e4m3"),
    "saved": ("groupwise", "off"),
    "saved_format": ("e4m3", "int8", "auto"),
    "attention_format": ("e4m3", "int8", "auto"),
    "codegen": ("inductor", "eager"),
}
BOOLEANS = ("emulate", "saved_attention")
GROUP_SIZES = (16, 65536)

# Where Hugging Face, timm and torchtitan keep the output head, in the model itself or in a wrapper around it.
HEADS = (
    *("lm_head", "*.lm_head", "embed_out", "*.embed_out", "output_projection", "*.output_projection", "output"),
    *("head", "*.head", "head.fc", "*.head.fc", "fc", "classifier", "*.classifier", "score", "*.score"),
    *("cls.predictions.decoder", "*.cls.predictions.decoder", "cls.seq_relationship", "qa_outputs", "*.qa_outputs"),
)


class FrozenOptions(Mapping[str, Any]):
    """An immutable, hashable mapping of Inductor options."""

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return repr(dict(sorted(self._items.items())))


@dataclass(frozen=True)
class Recipe:
    """What goes in which format. Frozen and hashable; equal recipes give the same compiled code and the same cache key.

    Attributes:
        linear: FP8 linears: "off", "tensorwise" (one scale per tensor) or "rowwise" (one per row of an operand).
        linear_formats: "hybrid" (activations and weights E4M3, gradients E5M2) or "e4m3" (all E4M3).
        linear_skip: fnmatch patterns on the module paths of linears that stay in their dtype; by default the places where
            libraries keep the output head. A linear tied to an embedding stays too.
        emulate: decode the codes and multiply in the model's dtype, on any device: FP8's numbers without its speed.
        saved: how tensors are kept from forward to backward: "groupwise" (one scale per group) or "off".
        saved_format: "e4m3", "int8", or "auto" (the better of the two, group by group, decided at run time).
        group_size: elements per scale, 16 ... 65536.
        saved_attention: whether operands and results of attention are encoded too.
        attention_format: the format of those. INT8 by default: the backward of attention exponentiates q k' again, which
            turns E4M3's relative error into a factor (measured on the demo: gradients of k at 10 dB, against 23 in INT8).
        min_saved_numel: tensors with fewer elements are kept as they are.
        skip: fnmatch patterns on module paths ("layers.0.*"); tensors made there are kept as they are.
        codegen: "inductor", or "eager": the same rewritten graph, run node by node (tests, debugging).
        inductor: options handed to Inductor, as in ``torch.compile(options=...)``.
        dump: folder for graph dumps; by default FP8COMPILE_DUMP, where that is set. Never changes what is compiled or cached.
    """

    linear: str = "tensorwise"
    linear_formats: str = "hybrid"
    linear_skip: tuple[str, ...] = HEADS
    emulate: bool = False
    saved: str = "groupwise"
    saved_format: str = "e4m3"
    group_size: int = 128
    saved_attention: bool = True
    attention_format: str = "int8"
    min_saved_numel: int = 4096
    skip: tuple[str, ...] = ()
    codegen: str = "inductor"
    inductor: Mapping[str, Any] = FrozenOptions()
    dump: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", _as_patterns("skip", self.skip))
        object.__setattr__(self, "linear_skip", _as_patterns("linear_skip", self.linear_skip))
        object.__setattr__(self, "inductor", _as_options(self.inductor))
        _check(self)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Recipe:
        """The recipe called ``name`` ("default", "conservative", ...) with ``changes`` to single fields.

        Raises:
            ValueError: no such preset or field, or a value it cannot have; names the nearest right one.
        """
        if name not in PRESETS:
            raise ValueError(f"fp8compile has no preset {name!r}.{nearest(name, PRESETS)}")
        for unknown in changes.keys() - _FIELDS:
            raise ValueError(f"Recipe has no field {unknown!r}.{nearest(unknown, [*_FIELDS, 'preset'])}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Recipe:
        """The recipe that ``torch.compile(..., options=...)`` describes: ``preset`` plus fields of Recipe."""
        options = dict(options or {})
        return cls.preset(options.pop("preset", "default"), **options)

    def __str__(self) -> str:
        """Only what differs from the default recipe."""
        fields = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Recipe({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"

    @property
    def key(self) -> str:
        """A stable name for everything that changes compiled code (so: all fields but ``dump``)."""
        values = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.compare]
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "conservative": {"saved_attention": False},
    "linear_only": {"linear": "tensorwise", "saved": "off"},
    "storage_only": {"linear": "off"},
    "off": {"linear": "off", "saved": "off"},
}
_FIELDS = frozenset(f.name for f in dataclasses.fields(Recipe))


def _check(recipe: Recipe) -> None:
    for name, allowed in CHOICES.items():
        value = getattr(recipe, name)
        if value not in allowed:
            raise ValueError(f"Recipe.{name} cannot be {value!r}.{nearest(str(value), allowed)}")
    for name in BOOLEANS:
        if not isinstance(getattr(recipe, name), bool):
            raise ValueError(f"Recipe.{name} must be True or False, not {getattr(recipe, name)!r}.")
    low, high = GROUP_SIZES
    if not _is_int(recipe.group_size) or not low <= recipe.group_size <= high:
        raise ValueError(f"Recipe.group_size must be an integer from {low} to {high}, not {recipe.group_size!r}.")
    if not _is_int(recipe.min_saved_numel) or recipe.min_saved_numel < 0:
        raise ValueError(f"Recipe.min_saved_numel must be a number of elements >= 0, not {recipe.min_saved_numel!r}.")
    if recipe.dump is not None and not isinstance(recipe.dump, str):
        raise ValueError(f"Recipe.dump must be the path of a folder, not {recipe.dump!r}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f'Recipe.{name} must be module path patterns such as ("layers.0.*",), not {value!r}.')
    return tuple(patterns)


def _as_options(value: Any) -> FrozenOptions:
    if not isinstance(value, Mapping):
        raise ValueError(f"Recipe.inductor must be a dict of Inductor options, not {value!r}.")
    return FrozenOptions(value)


def nearest(name: str, known: Iterable[str], *, listed: bool = True) -> str:
    """ "Did you mean ...? Known: ...", for the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"{meant} Known: {', '.join(known)}." if listed else meant
