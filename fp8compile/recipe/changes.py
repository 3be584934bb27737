"""Changes to a recipe as people write them: groups as dicts or as one plain value, and single fields by dotted names.

{"linears": "delayed", "saved": {"format": "4bit"}, "saved.min_numel": 0}
-> {"linears.scaling": "delayed", "saved.format": "4bit", "saved.min_numel": 0}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fp8compile._messages import nearest
from fp8compile.recipe.groups import GROUPS, OF_ANOTHER, Group

TOP = ("modules", "skip", "collectives")  # fields of the recipe itself
FIELDS: Mapping[str, Any] = {  # every field of a group by its dotted name, with its default
    f"{name}.{each.name}": each.default for name, kind in GROUPS.items() for each in dataclasses.fields(kind)
}
# Fields that only look on: no part of what makes recipes equal, nor of their keys.
LOOK_ON = tuple(
    f"{name}.{f.name}" for name, kind in GROUPS.items() for f in dataclasses.fields(kind) if not f.compare
)


def single(changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` with a name for each field that they set: dotted, or of the recipe itself.

    Raises:
        ValueError: a name that does not exist, a group that is no dict, or two values for one field.
    """
    found: dict[str, Any] = {}
    for written, name, value in _written(changes):
        if name in found and found[name] != value:
            raise ValueError(
                f"Recipe.{name} is {found[name]!r} and, by {written!r}, {value!r}. Leave one of them out."
            )
        found[name] = value
    return found


def _written(changes: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """What is written, the field that it sets, its value."""
    for key, value in changes.items():
        if key in GROUPS and isinstance(value, Mapping | GROUPS[key]):
            fields = value if isinstance(value, Mapping) else vars(value)
            for name, each in fields.items():
                yield key, _known(f"{key}.{name}"), each
        elif key in GROUPS and GROUPS[key].SHORT:
            yield key, f"{key}.{_field_for(key, value)}", value
        elif key in GROUPS:
            raise ValueError(f"Recipe.{key} must be a dict of its fields, not {value!r}.")
        else:
            yield key, _known(key), value


def _field_for(group: str, value: Any) -> str | None:
    """The field of ``group`` that a plain value is for."""
    other = OF_ANOTHER.get((group, value)) if isinstance(value, str) else None
    return other or GROUPS[group].SHORT


def _known(name: str) -> str:
    if name not in FIELDS and name not in TOP:
        own = [known for known in FIELDS if known.endswith(f".{name.rpartition('.')[2]}")]
        cure = f" Did you mean {own[0]!r}?" if own else nearest(name, [*FIELDS, *GROUPS, *TOP, "preset", "recipe"])
        raise ValueError(f"Recipe has no field {name!r}.{cure}")
    return name


def changed_group(group: Group, changes: Mapping[str, Any]) -> Group:
    """``group`` with the changes that are for it."""
    begin = f"{group.NAME}."
    own = {name.removeprefix(begin): value for name, value in changes.items() if name.startswith(begin)}
    return dataclasses.replace(group, **own) if own else group


def as_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by dotted names as people write them: groups as dicts, or as the one value that stands for it."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        group, _, field = name.partition(".")
        if field:
            found.setdefault(group, {})[field] = value
        else:
            found[group] = value
    return {name: _shortest(name, value) if name in GROUPS else value for name, value in found.items()}


def _shortest(name: str, fields: dict[str, Any]) -> Any:
    if len(fields) == 1:
        ((field, value),) = fields.items()
        if field == _field_for(name, value):
            return value
    return fields
