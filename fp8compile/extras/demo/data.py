"""Real text that every machine has: the bytes of Python's own standard library source.

    split   by file: held out  <=>  sha256(relative path) mod 20 == 0   (about 5 % of the files)
    text    files in the order of their relative paths, a NUL byte after each (no Python source contains one)
    train   window starts drawn from a seeded generator: the same seed gives every arm the same batches
    check   validation windows lie at fixed, evenly spaced places: the same for every arm and seed

The library differs a little between Python versions; ``Corpus.sha256`` tells whether two runs saw the same.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
ONE_FILE_IN = 20
LEAST_BYTES = 100_000
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
)


class NoSource(ValueError):
    """This Python's standard library is not there as source files."""


@dataclass(frozen=True)
class Corpus:
    """The two halves of the text, as bytes.

    Attributes:
        train: uint8, every file that is not held out.
        validation: uint8, the held-out files.
        train_files: relative paths, sorted.
        validation_files: relative paths, sorted.
        sha256: the hash of both halves.
    """

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    sha256: str


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every ``*.py`` file below ``root`` (default: this Python's standard library).

    Raises:
        NoSource: too little source there, as in a Python whose library is one zip file.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = source_files(root)
    kept = tuple(n for n in names if not is_held_out(n))
    held = tuple(n for n in names if is_held_out(n))
    train, validation = _text(root, kept), _text(root, held)
    if min(len(train), ONE_FILE_IN * len(validation)) < LEAST_BYTES:
        raise NoSource(
            f"only {len(train) + len(validation)} bytes of Python source below {root}; the demo reads "
            "the standard library as .py files: run it with a Python that ships them"
        )
    digest = hashlib.sha256(train + b"\n" + validation).hexdigest()
    return Corpus(_tensor(train), _tensor(validation), kept, held, digest)


def source_files(root: Path) -> list[str]:
    """Relative POSIX paths of the library's own source, sorted; tests and bundled packages left out."""
    names = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return sorted(name.as_posix() for name in names if not SKIPPED_FOLDERS & set(name.parts))


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % ONE_FILE_IN == 0


def train_batches(text: Tensor, batch: int, length: int, seed: int, steps: int) -> Iterator[Tensor]:
    """``steps`` batches of windows at seeded random places, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield _windows(text, torch.randint(len(text) - length + 1, (batch,), generator=generator), length)


def validation_batches(text: Tensor, batch: int, length: int, windows: int) -> list[Tensor]:
    """``windows`` evenly spaced windows in batches, int64 [batch, length]."""
    assert windows % batch == 0, (windows, batch)
    starts = torch.arange(windows) * (len(text) - length) // max(windows - 1, 1)
    return [_windows(text, part, length) for part in starts.reshape(-1, batch)]


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def _text(root: Path, names: tuple[str, ...]) -> bytes:
    return b"".join((root / name).read_bytes() + b"\0" for name in names)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
