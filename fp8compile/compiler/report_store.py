"""Where reports live: collected while a graph compiles, kept beside Inductor's cache, found again by the model's tensors.

On a warm AOTAutograd cache hit neither passes nor partitioner run, so a report held in memory would be empty. Each report
is therefore written to Inductor's cache folder under the same key that the compiled code has: the graph key is part of
the partitioner's ``uuid()`` and so of the cache key. A cache entry without its report (a remote cache, a folder cleared
by hand) is reported as such. A graph whose statistics are read is then compiled again (fp8compile/compiler/inductor.py),
since the report says what each of its numbers is about.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.region_reports import Cut
from fp8compile.compiler.runs import Runs
from fp8compile.fx.provenance import parameter_names
from fp8compile.fx.regions import Region
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import Notes

log = logging.getLogger("fp8compile")

INFERENCE = "an inference graph: no gradients are recorded, so nothing is saved and nothing was rewritten"
COMPILED_FOR_ANOTHER_INSTANCE = (
    "compiled for another instance of the same code, with parameters of the same shapes; Dynamo runs it for this model "
    "too unless a guard fails"
)
NO_GRAPH_COMPILED = (
    "torch.compile was asked for backend fp8compile and compiled no graph: every frame was skipped or fell back to eager. "
    "A plain container such as nn.Sequential compiled in place is one cause: use model = torch.compile(model, ...), or "
    "run with TORCH_LOGS=graph_breaks to see others"
)
REPORT_NOT_CACHED = (
    "the compiled code came from a cache that does not hold its report; "
    "fp8compile.explain(model, ...) compiles afresh and shows it"
)


@dataclass(frozen=True)
class JointNotes:
    """What happened to a joint graph before it was cut: the original graph, the notes of the passes, which region it is."""

    plain: GraphModule
    notes: Notes = field(default_factory=Notes)
    disabled: tuple[str, ...] = ()
    region: Region | None = None


@dataclass
class Collector:
    """The report of one graph, filled by the passes as they run.

    ``compiled`` says whether passes ran at all: it stays False when the compiled code came from a cache. ``joint`` holds the
    joint graphs on their way to the partitioner, each with its own notes. Regions and the graphs that operators run are among
    them, and not each of them is cut. ``cuts`` holds the regions that were cut, by the graph of their forward.
    """

    parts: list[GraphReport] = field(default_factory=list)
    joint: dict[Graph, JointNotes] = field(default_factory=dict)
    cuts: dict[Graph, Cut] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    compiled: bool = False

    def add(self, part: GraphReport) -> None:
        self.parts.append(part)


@dataclass
class Compiled:
    """One compiled graph: its reports, its calls, and what is known of the parameters it reads.

    ``paths`` are the graph's own names of its parameters, ``signatures`` their shapes and dtypes, in the order of its inputs.
    """

    reports: tuple[GraphReport, ...]
    recipe: Recipe
    modules: frozenset[weakref.ref[type]]
    paths: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    runs: Runs = field(default_factory=Runs, compare=False)

    @property
    def types(self) -> set[type]:
        """The types of the modules it ran in, as far as they still exist."""
        return {kind for ref in self.modules if (kind := ref()) is not None}

    @property
    def is_dead(self) -> bool:
        """Whether no model can own it any more: its parameters or, if it has none, the modules it ran in are gone."""
        return not self.alive if self.paths else bool(self.modules) and not self.types

    def replaces(self, other: Compiled) -> bool:
        """Whether it is ``other`` compiled again: the same was done to a graph with the same parameters."""
        mine, theirs = (
            (c.recipe, [id(ref()) for ref in c.runs.first.parameters], c.modules, c.reports) for c in (self, other)
        )
        return mine == theirs

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether it reads a parameter of ``model``; for a graph without any, whether it ran in one of its module types."""
        if self.paths:
            return bool(self.alive & parameter_names(model).keys())
        types = self.types
        return any(type(m) in types for m in model.modules())

    @property
    def alive(self) -> set[int]:
        """The identities of the parameters it was called with, as far as they still exist."""
        return set[int]().union(*(instance.alive for instance in self.runs.instances))

    def serves(self, model: nn.Module) -> bool:
        """Whether Dynamo may run it for ``model`` too: another instance of the same code with like parameters."""
        alike = {_signature(p) for p in model.parameters()}
        kinds = {type(m) for m in model.modules()}
        return self.types <= kinds and bool(self.signatures) and set(self.signatures) <= alike


_collecting: dict[str, Collector] = {}
_compiled: list[Compiled] = []  # of models that still exist, each graph once
_arrived = False
_warned: set[str] = set()


def start(graph_key: str) -> None:
    """Forget what an earlier compilation under this key left when it failed half way."""
    _collecting.pop(graph_key, None)


def collecting(graph_key: str) -> Collector:
    """The collector of the graph that is compiling under this key."""
    return _collecting.setdefault(graph_key, Collector())


def came_from_cache(graph_key: str) -> bool:
    """Whether the graph just compiled, not yet finished, was found in a cache: no pass of ours ran."""
    collector = collecting(graph_key)
    return not (collector.compiled or collector.parts)


def is_lost(graph_key: str) -> bool:
    """Whether the graph just compiled, not yet finished, came from a cache that does not hold its report."""
    return came_from_cache(graph_key) and not _read(graph_key)


def finish(graph_key: str) -> tuple[GraphReport, ...]:
    """The reports of the graph just compiled: as collected, or, when it came from the cache, as stored with it."""
    cached = came_from_cache(graph_key)
    collector = _collecting.pop(graph_key)
    if not cached:
        parts = tuple(collector.parts) or (GraphReport("inference", remarks=(INFERENCE,)),)
        _write(graph_key, parts)
        return parts
    return _read(graph_key) or (GraphReport("unknown", remarks=(REPORT_NOT_CACHED,)),)


def warn_once(message: str) -> None:
    """Log a warning under "fp8compile", the first time it is said in this process."""
    if message not in _warned:
        _warned.add(message)
        log.warning(message)


def remember(
    reports: tuple[GraphReport, ...], recipe: Recipe, paths: Sequence[str], modules: frozenset[type], runs: Runs
) -> None:
    """Keep the reports of a graph that ran in modules of these types; ``paths`` are its own names of its parameters.

    Reports that nobody can ask for any more are dropped. A graph compiled again (after ``torch._dynamo.reset``) replaces the
    earlier one.
    """
    signatures = tuple(_signature(p) for ref in runs.first.parameters if (p := ref()) is not None)
    new = Compiled(reports, recipe, frozenset(map(weakref.ref, modules)), tuple(paths), signatures, runs)
    _compiled[:] = [c for c in _compiled if not c.is_dead and not new.replaces(c)] + [new]


def graph_arrives() -> None:
    """Note that the backend was called with a graph; whether it can be compiled is seen later."""
    global _arrived
    _arrived = True


def any_graph_arrived() -> bool:
    """Whether the backend was ever called with a graph in this process."""
    return _arrived


def compiled_parameters() -> set[int]:
    """The identities of all parameters, still alive, that some graph reads."""
    return set().union(*(c.alive for c in _compiled))


def compiled_for(model: nn.Module) -> list[Compiled]:
    """The graphs compiled so far that belong to ``model``, in order.

    Dynamo compiles again for a second instance of the same code only if its guards ask for it. Otherwise the graphs of the
    first instance serve both, and are found by the shapes of their parameters.
    """
    own = [c for c in _compiled if c.belongs_to(model)]
    if own:
        return own
    serving = [c for c in _compiled if c.serves(model) and c.alive]
    latest = [c for c in serving if c.alive & serving[-1].alive]  # those of one model
    return [
        dataclasses.replace(c, reports=tuple(_with_remark(r, COMPILED_FOR_ANOTHER_INSTANCE) for r in c.reports))
        for c in latest
    ]


def _with_remark(report: GraphReport, remark: str) -> GraphReport:
    return dataclasses.replace(report, remarks=(*report.remarks, remark))


def _signature(value: torch.Tensor) -> str:
    return f"{tuple(value.shape)} {value.dtype} {value.device} {value.requires_grad}"


def path_of(key: str, folder: str = "fp8compile") -> Path:
    """Where something is kept of code that may come from Inductor's cache, beside it."""
    return Path(private.cache_dir()) / folder / f"{key}.json"  # makes the cache folder


def write_whole(path: Path, content: object) -> None:
    """A JSON file that is there as a whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            json.dump(content, file)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _write(graph_key: str, parts: Iterable[GraphReport]) -> None:
    reports = [p.to_dict() for p in parts]
    try:
        write_whole(path_of(graph_key), {"sha256": _digest(reports), "reports": reports})
    except OSError as error:
        log.warning("the report cannot be kept beside the cache: %s", error)


def _read(graph_key: str) -> tuple[GraphReport, ...]:
    """The reports as they were written; () where the file is gone or anything in it has changed."""
    try:
        found = json.loads(path_of(graph_key).read_text())
        whole = found["sha256"] == _digest(found["reports"])
        return tuple(map(GraphReport.from_dict, found["reports"])) if whole else ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def _digest(reports: object) -> str:
    return hashlib.sha256(json.dumps(reports).encode()).hexdigest()
