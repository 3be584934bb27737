"""A mapping that does not change, so that a recipe that holds one is a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class FrozenMapping(Mapping[str, Any]):
    """An immutable mapping from strings; subclasses decide what equality and hash compare."""

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class FrozenModules(FrozenMapping):
    """Patterns and their recipes, hashable. Their order matters, so equality compares it too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenModules) and tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(dict(self))
