"""Measures cases of one benchmark, one after the other: what ``suite`` starts. Prints each row behind a mark.

    python benchmarks/worker.py PARENT DEVICE TINY BENCHMARK CASE...

PARENT is the process that reads the rows: where it is gone, killed, the device is left to the next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder is all that is there


def main() -> None:
    parent, device, tiny, name, *cases = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    from benchmarks.harness.run_alone import measured_row
    from benchmarks.registry import Setting  # takes seconds; the parent is watched by now
    from benchmarks.suite import NAMES, ROW_MARK

    setting = Setting.on(device, tiny == "1")
    for case in cases:
        started = time.monotonic()
        row = measured_row(NAMES[name], NAMES[name].case(case), setting)
        row["took_seconds"] = round(time.monotonic() - started, 1)
        print(ROW_MARK + json.dumps(row), flush=True)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
