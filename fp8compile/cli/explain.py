"""``fp8compile explain pkg.mod:factory`` and ``fp8compile dump pkg.mod:factory --out DIR``: without training.

The factory returns ``(model, args)`` or ``(model, args, kwargs)``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp8compile._messages import nearest
from fp8compile.cli.ends import DONE, FAILED, WRONG, Wrong, one_line, said
from fp8compile.cli.options import RETURNS
from fp8compile.cli.recipes import recipe_from
from fp8compile.fx import dump_files
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.report import Report
from fp8compile.tools.explain import explain

Case = tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]


def run_explain(values: argparse.Namespace) -> int:
    return _answered("explain", values)


def run_dump(values: argparse.Namespace) -> int:
    return _answered("dump", values, **{"debug.dump": str(values.out)})


def case_from(module_name: str, path: str) -> Case:
    """Model and arguments that the factory ``path`` of a module returns; the current directory is importable.

    Raises:
        Wrong: there is no such module or factory, or it returns something else.
    """
    factory: Any = _imported(module_name)
    for part in path.split("."):
        if not hasattr(factory, part):
            raise Wrong(f"{module_name} has no {path!r}.{nearest(part, _public(factory), listed=False)}")
        factory = getattr(factory, part)
    name = f"{module_name}:{path}"
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


def _answered(command: str, values: argparse.Namespace, **changes: Any) -> int:
    """The exit code: 2 for a wrong command line, 1 for a model or folder that cannot be used. Each error is one line."""
    try:
        recipe = recipe_from(values.preset, values.fields, **changes)
        report = _explained(values, recipe)
        if values.html:
            report.to_html(values.html)
    except Exception as error:
        if values.traceback:
            traceback.print_exception(error)
        if isinstance(error, Wrong):
            return said(command, error, WRONG)
        return said(command, one_line(error), FAILED)
    print(report.to_json() if values.json else report.to_text() if values.full else report)
    if values.html:
        print(f"page: {values.html}", file=sys.stderr)
    if recipe.debug.dump:
        print(f"graphs: {recipe.debug.dump}", file=sys.stderr)
    return DONE


def _explained(values: argparse.Namespace, recipe: Recipe) -> Report:
    case = case_from(*values.factory)
    with dump_files.required(), contextlib.nullcontext() if values.traceback else _without_logged_traceback():
        return explain(*case, recipe=recipe, kernels=values.kernels)


@contextlib.contextmanager
def _without_logged_traceback() -> Iterator[None]:
    """An operation that refuses its shapes raises in torch's fake tensors, which log the traceback as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
