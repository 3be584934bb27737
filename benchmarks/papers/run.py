"""One paper's ablation from end to end: run, printed, written.

DIR/NAME.json    every figure, the options, versions
DIR/NAME.png     the plot
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.papers.outcome import Outcome
from benchmarks.papers.papers import PAPERS
from fp8compile.extras.demo.extras import require_extras
from fp8compile.extras.demo.output_files import environment, without_nan


@dataclass(frozen=True)
class ReproduceOptions:
    """What is run, and where its files go; None: the paper's default."""

    name: str
    out: Path
    seeds: int | None = None
    steps: int | None = None


def run(options: ReproduceOptions) -> list[Path]:
    """Run, print and write; returns the files.

    Raises:
        MissingExtra: matplotlib is not installed.
        NoSource: this Python has no source to train on.
        OSError: the folder cannot be written to.
    """
    require_extras(("matplotlib",), "the plot")
    options.out.mkdir(parents=True, exist_ok=True)
    paper = PAPERS[options.name]
    seeds, steps = options.seeds or paper.seeds, options.steps or paper.steps
    print(f"{paper.title}: {paper.about}\n{seeds} seeds, {steps} steps\n", flush=True)
    began = time.perf_counter()
    outcome: Outcome = importlib.import_module(paper.home).reproduce(seeds, steps, _tell)
    seconds = time.perf_counter() - began
    print(outcome.text(None))
    found = {"paper": asdict(paper), "seeds": seeds, "steps": steps, "seconds": seconds}
    files = [options.out / f"{options.name}{suffix}" for suffix in (".json", ".png")]
    document = {**found, **outcome.to_dict(), "environment": environment()}
    files[0].write_text(json.dumps(without_nan(document), indent=1) + "\n", encoding="utf-8")
    outcome.draw(files[1])
    print(f"\n{seconds:.0f} s; written: {', '.join(map(str, files))}")
    return files


def _tell(line: str) -> None:
    """What is done so far, on standard error: a run takes minutes."""
    print(line, file=sys.stderr, flush=True)
