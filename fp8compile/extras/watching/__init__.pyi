"""``watch`` with its types; ``__init__.py`` imports it where it is first used."""

from fp8compile.extras.watching.watcher import watch

__all__ = ["watch"]
