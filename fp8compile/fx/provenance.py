"""Module paths from the top of a model, where a graph knows them from its own frame only.

Where a graph breaks inside a module, Dynamo compiles what follows, or that module, by itself, and its paths begin there. The
parameters that such a graph reads say where in the model that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Set


def whole_path(path: str, modules: Set[str], parameters: Iterable[str]) -> str:
    """``path`` as one of ``modules``: itself, or with what all the parameters (by name) have in common before it."""
    if path and path in modules:
        return path
    begin = _common(parameters)
    return next((whole for whole in _joined(begin, path) if whole in modules), path)


def _common(parameters: Iterable[str]) -> list[str]:
    """The module path that all names begin with, in parts."""
    owners = [name.split(".")[:-1] for name in parameters]
    begin: list[str] = []
    for parts in zip(*owners, strict=False):
        if len(set(parts)) > 1:
            break
        begin.append(parts[0])
    return begin


def _joined(begin: list[str], path: str) -> Iterable[str]:
    """``path`` beneath the longest beginning first."""
    for length in range(len(begin), 0, -1):
        yield ".".join([*begin[:length], *([path] if path else [])])
