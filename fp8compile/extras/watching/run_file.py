"""The file of a run, appended to line by line; what cannot be written is said once, and training goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8compile.extras.watching.lines import ENDING, line_of_step, text_of

_log = logging.getLogger("fp8compile")
CANNOT_WRITE = "cannot write %s (%s): lines of the run are lost as long as that lasts; training goes on"


class RunFile:
    """Appends to ``folder/rank0.jsonl``. Each line is one write, so what stands in the file is whole but for its last line.

    Args:
        folder: made where it is not there.
        rank: of this process; each rank has a file of its own.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.path = Path(folder) / f"rank{rank}{ENDING}"
        self._file: int | None = None
        self._cut = self._warned = False

    def begin(self, header: Mapping[str, Any]) -> None:
        """Open the file and write the header, behind what is there. A line that was cut off is ended first."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._cut = _ends_within_a_line(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._warn(error)
            return
        self._write(text_of(header))

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a step's line."""
        self._write(line_of_step(record))

    def _write(self, text: str) -> None:
        """One write. Behind one that failed a line may be cut off, so the next one begins a line of its own."""
        if self._file is None:
            return
        data = (("\n" if self._cut else "") + text).encode("ascii")
        try:
            written = os.write(self._file, data)
            self._cut = written < len(data)
            if self._cut:
                raise OSError(f"{written} of {len(data)} bytes written: is the disk full?")
        except OSError as error:
            self._cut = True
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(CANNOT_WRITE, self.path, error.strerror or error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
