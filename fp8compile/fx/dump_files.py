"""Folders of graph dumps: claimed, written to, and given up with one warning where that fails; torch's structured trace.

A dump never stops a training run. Where a folder cannot be made or written to, or the disk is full, a warning says so once a
folder, the unfinished file is removed, and the graph is compiled without the rest of its dump.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

import torch

from fp8compile import _torch as private

VARIABLE = "FP8COMPILE_DUMP"
FILES = ("before.txt", "after.txt", "diff.txt", "after.dot", "after-full.dot", "after-full.txt")  # of a pass

log = logging.getLogger("fp8compile")
_claimed: Counter[Path] = Counter()  # folders of a kind, by their name without a number
_said: set[Path] = set()  # the folders of which a warning has said that they cannot be written to
_required: ContextVar[bool] = ContextVar("fp8compile_dump_required", default=False)


def root_of(dump: str | None) -> str | None:
    """The folder of all dumps: a recipe's, or the environment's."""
    return dump or os.environ.get(VARIABLE)


def claim(root: str, kind: str = "graph") -> Path | None:
    """The folder of the next graph of a kind: created, writable, and without the steps of an earlier run; None if that
    fails."""
    base = Path(root).expanduser().absolute()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        base /= f"rank-{torch.distributed.get_rank()}"
    folder = base / f"{kind}-{_claimed[base / kind]}"
    with _said_once(folder, base) as done:
        _write(folder, {"report.txt": ""})
        _forget_steps(folder)
        done.append(folder)
    if not done:
        return None
    _claimed[base / kind] += 1
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
        for name in FILES:
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
        cure = f"set Recipe.debug.dump or {VARIABLE} to a folder that can be made and written to, or unset it"
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
