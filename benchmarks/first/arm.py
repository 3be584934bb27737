"""One arm: ``python benchmarks/first/arm.py KIND ARGUMENT...``, started by a run (``runner``), which it tells facts."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder: its names are not modules of their own

from benchmarks.first.plan import KINDS
from benchmarks.first.speaking import Told, closed, dies_with_parent


def main() -> None:
    began, told = time.time(), Told.here()
    dies_with_parent()
    kind, *arguments = sys.argv[1:]
    error: BaseException | None = None
    try:
        importlib.import_module(f"benchmarks.first.arms.{KINDS[kind].module}").run(told, *arguments)
    except BaseException as found:  # SystemExit of a library too: an arm ends by one fact
        error = found
    closed(told, began, error)


if __name__ == "__main__":
    main()
