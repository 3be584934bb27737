"""``fp8compile explain pkg.mod:factory`` and ``fp8compile dump pkg.mod:factory --out DIR``: without training.

The factory returns ``(model, args)`` or ``(model, args, kwargs)``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fp8compile._messages import nearest
from fp8compile.compiler import dump
from fp8compile.recipe.recipe import PRESETS, Recipe
from fp8compile.reporting.report import Report
from fp8compile.tools.explain import explain

FAILED, WRONG = 1, 2
RETURNS = "(model, args) or (model, args, kwargs)"

Case = tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]


class Wrong(ValueError):
    """The command line names something that is not there."""


def add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="pkg.mod:factory", help=f"a callable that returns {RETURNS}")
    parser.add_argument("--preset", default="default", help=f"the recipe: {', '.join(PRESETS)}")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "-o", dest="fields", action="append", default=[], metavar="FIELD=VALUE", help="a field of the recipe"
    )


def add_dump_options(parser: argparse.ArgumentParser) -> None:
    add_explain_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the graphs")


def run_explain(values: argparse.Namespace) -> int:
    return _answered("explain", lambda: _explained(values))


def run_dump(values: argparse.Namespace) -> int:
    return _answered("dump", lambda: _explained(values, dump=str(values.out)))


def recipe_from(preset: str, fields: list[str], **changes: Any) -> Recipe:
    """The recipe that ``--preset`` and ``-o FIELD=VALUE`` describe."""
    try:
        return Recipe.preset(preset, **{**fields_from(fields), **changes})
    except ValueError as error:
        raise Wrong(str(error)) from error


def fields_from(fields: list[str]) -> dict[str, Any]:
    """What ``-o FIELD=VALUE`` says; a value is a Python literal, else a string (``true`` and ``false`` are booleans)."""
    given: dict[str, Any] = {}
    for field in fields:
        name, equals, text = field.partition("=")
        if not equals:
            raise Wrong(f"-o takes FIELD=VALUE, not {field!r}")
        try:
            given[name] = ast.literal_eval(text.title() if text in ("true", "false") else text)
        except (ValueError, SyntaxError):
            given[name] = text
    return given


def case_from(name: str) -> Case:
    """Model and arguments that the factory called ``pkg.mod:factory`` returns; the current directory is importable."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise Wrong(f"{name!r} is not of the form pkg.mod:factory")
    factory: Any = _imported(module_name)
    for part in path.split("."):
        if not hasattr(factory, part):
            raise Wrong(f"{module_name} has no {path!r}.{nearest(part, _public(factory), listed=False)}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise Wrong(f"{name} is of type {type(factory).__name__}, not a callable that returns {RETURNS}")
    return _checked(name, factory())


def _imported(module_name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise Wrong(f"cannot import {module_name}: {error}") from error


def _public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


def _checked(name: str, case: Any) -> Case:
    model, args, kwargs = (*case, {})[:3] if isinstance(case, (tuple, list)) and len(case) in (2, 3) else (None,) * 3
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not (isinstance(model, torch.nn.Module) and isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)):
        raise Wrong(f"{name} returned a value of type {type(case).__name__}, not {RETURNS}")
    return model, tuple(args), kwargs


def _explained(values: argparse.Namespace, **changes: Any) -> None:
    recipe = recipe_from(values.preset, values.fields, **changes)
    case = case_from(values.factory)
    with dump.required():
        report: Report = explain(*case, recipe=recipe)
    print(report.to_json() if values.json else report)
    if recipe.dump:
        print(f"graphs: {recipe.dump}", file=sys.stderr)


def _answered(command: str, run: Callable[[], None]) -> int:
    """The exit code of ``run``: 2 for a wrong command line, 1 for a model or folder that will not do; each one line."""
    try:
        run()
    except Wrong as error:
        return _said(command, error, WRONG)
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # what Dynamo wraps a backend's error in
        if not isinstance(cause, ValueError):
            raise
        return _said(command, cause, FAILED)
    return 0


def _said(command: str, error: Exception, code: int) -> int:
    print(f"fp8compile {command}: error: {error}", file=sys.stderr)
    return code
