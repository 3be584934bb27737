"""What an option takes: each is a ``type`` for argparse, which puts the option's name before the error."""

from __future__ import annotations

import ast
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from typing import Any

from fp8compile._messages import nearest


def at_least(least: int) -> Callable[[str], int]:
    """A whole number, ``least`` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def between(least: int, most: int) -> Callable[[str], int]:
    """A whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return parse


def minutes(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value


def one_of(noun: str, known: Iterable[str]) -> Callable[[str], str]:
    """One of these names; an error names the nearest."""
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"there is no {noun} {text!r}.{nearest(text, names)}")
        return text

    return parse


def several_of(noun: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of these names with commas between them, each once."""
    parse_one = one_of(noun, known)

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(map(parse_one, text.split(",")))
        if len(set(names)) < len(names):
            raise ArgumentTypeError(f"{text!r} names an {noun} twice")
        return names

    return parse


def field(text: str) -> tuple[str, Any]:
    """``FIELD=VALUE``: a value is a Python literal, else a string (``true`` and ``false`` are booleans)."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"-o takes FIELD=VALUE, not {text!r}")
    try:
        return name, ast.literal_eval(value.title() if value in ("true", "false") else value)
    except (ValueError, SyntaxError):
        return name, value


def factory(text: str) -> tuple[str, str]:
    """``pkg.mod:factory`` as module and path in it."""
    module, _, path = text.partition(":")
    if not module or not path:
        raise ArgumentTypeError(f"{text!r} is not of the form pkg.mod:factory")
    return module, path
