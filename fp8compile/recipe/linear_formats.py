"""The formats of a linear's operands: ``Recipe.linears.formats``.

    "hybrid"                           activations and weights E4M3, gradients E5M2
    "e4m3"                             all E4M3
    {"dgrad": "e4m3", "wgrad": "e5m2"} a gradient's format by the matmul that reads it; activations and weights E4M3

A dict that says the same as a name becomes that name, so that recipes that compute the same are equal. "forward" may be in
it, as "e4m3": no other is possible, since both operands of the forward would be E5M2, and ``torch._scaled_mm`` refuses that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8compile._messages import nearest
from fp8compile.recipe.frozen import FrozenMapping

HYBRID = "hybrid"
GRADIENTS: Mapping[str, Mapping[str, str]] = {
    HYBRID: {"dgrad": "e5m2", "wgrad": "e5m2"},
    "e4m3": {"dgrad": "e4m3", "wgrad": "e4m3"},
}
DIRECTIONS, FORMATS = ("forward", "dgrad", "wgrad"), ("e4m3", "e5m2")
EXAMPLE = '{"dgrad": "e4m3", "wgrad": "e5m2"}'


class FrozenFormats(FrozenMapping):
    """Formats by direction, hashable."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenFormats) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return repr(dict(sorted(self.items())))


def as_formats(value: Any) -> Any:
    """``value`` as a recipe keeps it: a name, or a dict of dgrad and wgrad that no name stands for.

    Raises:
        ValueError: a dict that leaves a direction open, has another key, or a format that the direction cannot have.
    """
    if not isinstance(value, Mapping):
        return value  # a name, which ``check_fields`` checks
    for key, name in value.items():
        if key not in DIRECTIONS:
            raise ValueError(f"Recipe.linears.formats has no direction {key!r}.{nearest(str(key), DIRECTIONS)}")
        if name not in FORMATS:
            raise ValueError(f"Recipe.linears.formats[{key!r}] cannot be {name!r}.{nearest(str(name), FORMATS)}")
    if value.get("forward", "e4m3") != "e4m3":
        raise ValueError(
            "Recipe.linears.formats['forward'] cannot be 'e5m2': both operands would be E5M2, which torch._scaled_mm does "
            "not multiply. Leave 'forward' out, or set it to 'e4m3'."
        )
    if missing := [direction for direction in DIRECTIONS[1:] if direction not in value]:
        raise ValueError(f"Recipe.linears.formats says nothing of {', '.join(missing)}. Name both, as in {EXAMPLE}.")
    gradients = {direction: value[direction] for direction in DIRECTIONS[1:]}
    same = [name for name, formats in GRADIENTS.items() if formats == gradients]
    return same[0] if same else FrozenFormats(gradients)


def gradient_format(formats: str | Mapping[str, str], direction: str) -> str:
    """The format of the gradient in a linear's matmul, by ``Recipe.linears.formats``; the forward reads none."""
    by_direction = GRADIENTS[formats] if isinstance(formats, str) else formats
    return by_direction.get(direction, "e4m3")
