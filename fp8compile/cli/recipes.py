"""The recipe that ``--preset`` and ``-o FIELD=VALUE`` describe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fp8compile.cli.ends import Wrong
from fp8compile.recipe.recipe import Recipe


def recipe_from(preset: str, fields: Iterable[tuple[str, Any]], **changes: Any) -> Recipe:
    """The recipe of a command line.

    Raises:
        Wrong: there is no such field, or it cannot have this value.
    """
    try:
        return Recipe.preset(preset, **{**dict(fields), **changes})
    except ValueError as error:
        raise Wrong(str(error)) from error
