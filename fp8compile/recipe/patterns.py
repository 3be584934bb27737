"""Patterns on module paths, as recipes and watchers take them."""

from __future__ import annotations

import fnmatch


def in_module(path: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the module at ``path`` or one that holds it.

    "layers.0" is layers.0 and all under it; "layers.0.*" is all under it; "*.mlp" is every mlp and all under it.
    ``*`` matches dots too. "" stands for what the model does itself, outside all of its modules.
    """
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
