"""Graph dumps: every pass with the graph before and after it, as files, in torch's structured trace, or in memory.

    <folder>/graph-0/04-cut_for_bytes/{before,after}.txt, diff.txt, after.dot (folded), after-full.dot (every node)
    <folder>/graph-0/report.txt, report.json

Graphs are numbered in the order in which this process compiles them; a rank of a process group has a folder of its own.
The folder is ``Recipe.dump``, or FP8COMPILE_DUMP where the recipe has none. Two runs of a program give equal files.

A dump never stops a training run. Where a folder cannot be made or written to, or the disk is full, a warning says so once a
folder, the unfinished file is removed, and the graph is compiled without the rest of its dump.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fp8compile import _torch as private
from fp8compile.fx.snapshot import Snapshot, Step, op_diff, snapshot, snapshot_of
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.report import Report

__all__ = ["DumpWatcher", "Snapshot", "Step", "op_diff", "snapshot", "watch_for"]

VARIABLE = "FP8COMPILE_DUMP"

log = logging.getLogger("fp8compile")
_claimed: Counter[Path] = Counter()
_said: set[Path] = set()  # the folders of which a warning has said that they cannot be written to
_required: ContextVar[bool] = ContextVar("fp8compile_dump_required", default=False)


@dataclass
class DumpWatcher:
    """Watches one graph compile (see fp8compile/compiler/watchers.py) and hands on what it saw, pass by pass.

    Attributes:
        folder: where files go, if anywhere.
        traced: whether to write to torch's structured trace (TORCH_TRACE), for tlparse.
        kept: whether to keep the steps in memory.
    """

    folder: Path | None
    traced: bool
    kept: bool
    steps: list[Step] = field(default_factory=list)
    _count: int = 0

    def look(self, seen: object) -> Snapshot:
        return snapshot_of(seen)  # type: ignore[arg-type]

    def step(self, name: str, before: Snapshot, after: Snapshot) -> None:
        self._count += 1
        texts = {"before.txt": before.text, "after.txt": after.text, "diff.txt": op_diff(before, after)}
        texts["after.dot"] = after.to_dot()
        place = f"{self._count:02}-{name}"
        self._hand_on(place, texts, f"{name}_")
        if self.folder and not write(self.folder, {"after-full.dot": after.to_dot(expand=True)}, place):
            self.folder = None
        if self.kept:
            self.steps.append(Step(name, before, after))

    def report(self, reports: tuple[GraphReport, ...], recipe: Recipe) -> None:
        report = Report(reports, str(dataclasses.replace(recipe, dump=None)))
        self._hand_on("", {"report.txt": f"{report.to_text()}\n", "report.json": f"{report.to_json()}\n"})

    def _hand_on(self, place: str, texts: Mapping[str, str], prefix: str = "") -> None:
        if self.folder and not write(self.folder, texts, place):
            self.folder = None  # nothing more of this graph
        if self.traced:
            for name, text in texts.items():
                trace(f"fp8compile_{prefix}{name}", text)


def watch_for(recipe: Recipe, kept: bool = False) -> DumpWatcher | None:
    """The watcher of the next graph; None if nobody asks for one, or if the folder that was asked for cannot be used."""
    root = recipe.dump or os.environ.get(VARIABLE)
    folder, traced = claim(root) if root else None, tracing()
    return DumpWatcher(folder, traced, kept) if folder or traced or kept else None


def claim(root: str) -> Path | None:
    """The folder of the next graph: created, writable, and without the steps of an earlier run; None if that fails."""
    base = Path(root).expanduser().absolute()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        base /= f"rank-{torch.distributed.get_rank()}"
    folder = base / f"graph-{_claimed[base]}"
    with _said_once(folder, base) as done:
        _write(folder, {"report.txt": ""})
        _forget_steps(folder)
        done.append(folder)
    if not done:
        return None
    _claimed[base] += 1
    return folder


def write(folder: Path, texts: Mapping[str, str], place: str = "") -> bool:
    """Write files into a place in a graph's folder; returns whether that worked. The first failure of a dump is logged."""
    with _said_once(folder / place, folder.parent) as done:
        _write(folder / place, texts)
        done.append(folder)
    return bool(done)


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError:
            with contextlib.suppress(OSError):
                (folder / name).unlink()  # half a file would be misleading
            raise


def tracing() -> bool:
    """Whether torch writes a structured trace to a folder, as with TORCH_TRACE."""
    return any(getattr(handler, "root_dir", None) for handler in private.trace_log.handlers)


def trace(name: str, text: str) -> None:
    """An artifact of the graph being compiled: ``fp8compile_encode_saved_before`` from ``encode_saved_before.txt``."""
    stem, _, kind = name.rpartition(".")
    artifact = {
        "name": stem if kind == "txt" else f"{stem}_{kind}",
        "encoding": "json" if kind == "json" else "string",
    }
    private.trace_structured("artifact", metadata_fn=lambda: artifact, payload_fn=lambda: text)


def _forget_steps(folder: Path) -> None:
    for step in folder.glob("[0-9][0-9]-*"):
        for name in ("before.txt", "after.txt", "diff.txt", "after.dot", "after-full.dot"):
            (step / name).unlink(missing_ok=True)
        if not any(step.iterdir()):
            step.rmdir()


@contextlib.contextmanager
def _said_once(folder: Path, base: Path) -> Iterator[list[Path]]:
    """Turns a failure to write into a warning, given once for each dump's ``base``; the list stays empty then."""
    done: list[Path] = []
    try:
        yield done
    except OSError as error:
        why = error.strerror or str(error)
        place = f"graph dumps cannot be written to {folder}: {why}"
        cure = f"set Recipe.dump or {VARIABLE} to a folder that can be made and written to, or unset it"
        if _required.get():
            raise ValueError(f"{place}; {cure}") from error
        if base not in _said:
            _said.add(base)
            log.warning("%s. Training goes on without them; %s", place, cure)


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Within this context a dump that cannot be written is a ValueError: the dump is all that was asked for."""
    token = _required.set(True)
    try:
        yield
    finally:
        _required.reset(token)
