"""Every text once: data refers to it by its number."""

from __future__ import annotations


class Strings:
    """A table of texts; ``number(text)`` is the place of a text in ``all``, which begins with the empty one."""

    def __init__(self) -> None:
        self._numbers = {"": 0}

    def number(self, text: str) -> int:
        """The text's place in the table, at its end if it is new."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> list[str]:
        """The texts in the order of their numbers."""
        return list(self._numbers)
