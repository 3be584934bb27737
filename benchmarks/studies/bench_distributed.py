"""Each mode of torch.distributed beside one process that does the same arithmetic: which bits differ.

    python benchmarks/studies/bench_distributed.py --json benchmarks/results/distributed-cpu.json

Two ranks by gloo (FSDP2 + TP: four), four steps of AdamW with 8-bit states, the last batch uneven. The modes and the single
process are those of the tests (tests/support/parallel_modes.py). The JSON is written after every mode; modes that are not run
keep what it says of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment


def row_of(name: str) -> dict[str, Any]:
    """One mode, run."""
    from tests.support.parallel import STEPS
    from tests.support.parallel_modes import MODES, compared

    setup = MODES[name].setup
    return {
        "world": MODES[name].world,
        "dtype": str(setup.cast or setup.dtype).removeprefix("torch."),
        "stored_codes": setup.options.get("saved") != "off",
        "steps": STEPS,
        **dataclasses.asdict(compared(name)),
        **environment(),
    }


def main(words: Sequence[str] | None = None) -> None:
    from tests.support.parallel_modes import MODES

    parser = argparse.ArgumentParser(description="Modes of torch.distributed beside one process.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    rows: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in arguments.modes:
        rows[name] = row_of(name)
        differ = len(rows[name]["parameters"]) + len(rows[name]["states"])
        print(f"{name}: losses equal {rows[name]['losses']}, parameters and states that differ {differ}", flush=True)
        ordered = {each: rows[each] for each in MODES if each in rows}
        arguments.json.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
