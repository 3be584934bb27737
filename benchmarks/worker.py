"""Measures cases of one benchmark, one after the other: what ``suite`` starts. Prints each row behind a mark.

python benchmarks/worker.py DEVICE TINY BENCHMARK CASE...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a script's own folder is all that is there

from benchmarks.registry import Setting
from benchmarks.run_alone import measured_row
from benchmarks.suite import NAMES, ROW_MARK


def main() -> None:
    device, tiny, name, *cases = sys.argv[1:]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    setting = Setting.on(device, tiny == "1")
    for case in cases:
        started = time.monotonic()
        row = measured_row(NAMES[name], NAMES[name].case(case), setting)
        row["took_seconds"] = round(time.monotonic() - started, 1)
        print(ROW_MARK + json.dumps(row), flush=True)


def _end_with(parent: int) -> None:
    """Nobody reads the rows of a run that was killed: leave the device to the next."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
