"""The recipe in a file, for trainers that name a backend and have no place for its options (torchtitan).

    FP8COMPILE_RECIPE=recipe.json      {"linears": "rowwise", "modules": {"layers.0": "off"}}

The file holds what ``torch.compile(options=...)`` takes: fields of Recipe, or ``preset`` and fields. It is read only where
torch.compile got no options, and the report names it. It is read once in a process, so all graphs of a run have one recipe.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8compile.recipe.recipe import Recipe

VARIABLE = "FP8COMPILE_RECIPE"
REMARK = "the recipe is that of {path}, which FP8COMPILE_RECIPE names; torch.compile got no options"
EXAMPLE = 'a JSON object of fields of Recipe, such as {"linears": "rowwise"}'


def recipe_of(options: Mapping[str, Any] | None) -> Recipe:
    """The recipe for the options of torch.compile: what they describe or, where there are none, the file's.

    Raises:
        ValueError: an option that does not exist; a file that cannot be read or describes no recipe.
    """
    path = _path(options)
    return Recipe.from_options(options) if path is None else read_recipe(path)


def remarks_on(options: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What the report says of the file, where one decides."""
    path = _path(options)
    return () if path is None else (REMARK.format(path=path),)


@functools.cache
def read_recipe(path: str) -> Recipe:
    """The recipe that the JSON file at ``path`` describes, as it was when this process first read it.

    Raises:
        ValueError: no such file, no JSON, or a field, preset or value that does not exist; the message names the file.
    """
    try:
        options = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE} names {path!r}, which should be {EXAMPLE}. It cannot be read: {error}"
        ) from None
    if not isinstance(options, dict):
        raise ValueError(f"{VARIABLE} names {path!r}, which should be {EXAMPLE}. It holds {options!r}")
    try:
        return Recipe.from_options(options)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} names {path!r}: {error}") from None


def _path(options: Mapping[str, Any] | None) -> str | None:
    """The file that decides, as an absolute path; None where options were passed or the variable is unset or empty."""
    path = os.environ.get(VARIABLE)
    return os.path.abspath(path) if path and not options else None
