"""Patterns of a recipe that match nothing in a whole model, each with the nearest name that there is.

A single graph cannot tell: where Dynamo breaks a model, a pattern may match in another graph. So the remarks are made for all
graphs together, and the notes of single graphs on ``fp32.keep`` are dropped. Patterns of the default recipe get no remark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fp8compile._messages import nearest
from fp8compile.fx.provenance import without_wrappers
from fp8compile.islands.keep_fp32 import ATEN
from fp8compile.passes.widen_unsafe_ops import UNMATCHED
from fp8compile.recipe.patterns import in_module
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.report import Report

NO_MODULE = "{}: no module of this {} is called so.{}"
NO_TENSOR = (
    "{}: no tensor in this report was made in such a module. A graph that reads no parameter does not know where in the "
    "model it stands: its paths begin where Dynamo began it"
)
NO_OPERATION = "{}: no graph of this {} holds such an operation.{}"
FIELDS = ("skip", "linears.skip")
DEFAULT = Recipe()
WISH = f"Recipe.fp32.keep {UNMATCHED}"


def unmatched(graphs: Sequence[GraphReport], recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """A remark on each pattern of ``recipe`` that matches nothing in ``model`` or in the reports of its graphs.

    Args:
        graphs: the graphs of the whole model.
        recipe: the recipe they were compiled with.
        model: as the user wrote it, not what torch.compile made of it.
    """
    report = Report(tuple(graphs))
    entries = (*report.saved, *report.skips, *report.recomputed, *report.linears)
    made = {e.origin.module for e in entries}
    made |= {e.origin.module for g in graphs for name in Notes.ENTRIES for e in getattr(g.notes, name)}
    names = [without_wrappers(name) for name, _ in model.named_modules(remove_duplicate=False)]
    kind, several = type(model).__name__, len(graphs) > 1
    remarks = []
    for where, pattern, always in _patterns(recipe):
        if not _any_in((*made, *names), pattern):
            remarks.append(NO_MODULE.format(where, kind, nearest(pattern, names, listed=False)))
        elif not _any_in(made, pattern) and (several or always):
            remarks.append(NO_TENSOR.format(where))
    for pattern, meant in _kept_in_vain(graphs, recipe):
        where = f"Recipe.fp32.keep: {pattern!r}"
        if pattern.startswith(ATEN):
            remarks.append(NO_OPERATION.format(where, kind, meant))
        elif _any_in(names, pattern):
            remarks.append(NO_TENSOR.format(where))
        else:
            remarks.append(NO_MODULE.format(where, kind, nearest(pattern, names, listed=False)))
    return tuple(dict.fromkeys(remarks))


def without_wishes(graph: GraphReport) -> GraphReport:
    """The report of a graph without its notes on patterns of ``fp32.keep``, which may match in another graph."""
    skips = tuple(skip for skip in graph.notes.skips if skip.reason != WISH)
    return dataclasses.replace(graph, notes=dataclasses.replace(graph.notes, skips=skips))


def _patterns(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """For each pattern on modules, where it is written, the pattern, and whether a module without tensors is reported too."""
    for pattern in recipe.modules:
        yield f"Recipe.modules[{pattern!r}]", pattern, True
    inner = ((f"Recipe.modules[{path!r}]", other) for path, other in recipe.modules.items())
    seen: set[tuple[str, str]] = set()
    for where, each in (("Recipe", recipe), *inner):
        for field in FIELDS:
            for pattern in each.get(field):
                if (field, pattern) not in seen and pattern not in DEFAULT.get(field):
                    seen.add((field, pattern))
                    yield f"{where}.{field}: {pattern!r}", pattern, False


def _kept_in_vain(graphs: Sequence[GraphReport], recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Each pattern of ``fp32.keep`` that matches nothing in any graph, and the suggestion that the first graph makes."""
    for pattern in recipe.fp32.keep:
        begin = f"{pattern!r}."
        messages = [
            next((s.name for s in g.notes.skips if s.reason == WISH and s.name.startswith(begin)), None)
            for g in graphs
        ]
        if messages and messages[0] is not None and all(messages):
            yield pattern, messages[0].removeprefix(begin).partition(" Known:")[0]


def _any_in(paths: Iterable[str], pattern: str) -> bool:
    return any(in_module(path, pattern) for path in paths)
