"""A measurement that a recipe holds: a value with one text, which is its file, its pickle and its identity."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, ClassVar, TypeVar

M = TypeVar("M", bound="InAFile")


class InAFile:
    """What is kept as plain text; equal values have equal texts.

    Attributes:
        KIND: what it is called in errors.
        AGAIN: how to make another one, the beginning of a sentence.
    """

    KIND: ClassVar[str]
    AGAIN: ClassVar[str]

    @property
    def text(self) -> str:
        """What ``save`` writes."""
        raise NotImplementedError

    @classmethod
    def from_text(cls: type[M], text: str, where: str = "this text") -> M:
        """The value that ``text`` holds; ``where`` is what errors call it."""
        raise NotImplementedError

    @classmethod
    def load(cls: type[M], path: str | Path) -> M:
        """What ``save`` wrote to ``path``."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"no {cls.KIND} in {str(path)!r}: {error.strerror}. {cls.AGAIN}.save(path).") from None
        except UnicodeDecodeError:
            text = ""
        return cls.from_text(text, repr(str(path)))

    def save(self, path: str | Path) -> None:
        """Write it to a plain JSON file: in a recipe the path means the same as the value itself."""
        Path(path).write_text(self.text, encoding="utf-8")

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of everything it holds."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_text, (self.text,)  # equal ones pickle alike: Inductor's cache key is a pickle
