"""Every benchmark, and a run of some: each in a process of its own, a results file that is valid JSON at any moment.

    benchmarks/results/<device>-<date>.json   {"device", "gpu", "tiny", "versions", ..., "rows": {"benchmark: case": row}}

A row is written as soon as it is there, by replacing the whole file. Rows that are there are not measured again. A row that
takes longer than its limit, or whose process dies, is recorded as an error, and the process begins anew behind it; a row
that the end of the run cuts off is not recorded, and comes first the next time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.e2e import bench_capacity, bench_training
from benchmarks.harness.plots import written as written  # for the command
from benchmarks.harness.results import Results, key_of
from benchmarks.harness.run_alone import as_text
from benchmarks.harness.timing import OUT_OF_MEMORY
from benchmarks.kernels import bench_casts, bench_codecs, bench_linears, bench_optimizer_step, bench_pointwise
from benchmarks.layers import bench_layers
from benchmarks.registry import PARTS, Benchmark

BENCHMARKS: tuple[Benchmark, ...] = (
    *bench_optimizer_step.BENCHMARKS,
    *bench_codecs.BENCHMARKS,
    *bench_casts.BENCHMARKS,
    *bench_pointwise.BENCHMARKS,
    *bench_linears.BENCHMARKS,
    *bench_layers.BENCHMARKS,
    *bench_training.BENCHMARKS,
    *bench_capacity.BENCHMARKS,
)
NAMES = {benchmark.name: benchmark for benchmark in BENCHMARKS}
ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 90  # a process imports torch and measures this machine's rates before its first row


@dataclass(frozen=True)
class Options:
    """Of a run.

    Attributes:
        names: benchmarks or parts; none: all.
        device: "cpu" or "cuda".
        tiny: toy sizes.
        again: measure rows that are there already.
        out: the folder of the results file.
        minutes: no row runs on after this long; None: no end.
    """

    names: tuple[str, ...] = ()
    device: str = "cpu"
    tiny: bool = False
    again: bool = False
    out: Path = ROOT / "benchmarks" / "results"
    minutes: float | None = None

    @property
    def benchmarks(self) -> tuple[Benchmark, ...]:
        """What is to run, in the registry's order."""
        return tuple(b for b in BENCHMARKS if not self.names or {b.name, b.part} & {*self.names})


def listing() -> str:
    """Every benchmark with its part, its shapes and what it is compared with."""
    lines = []
    for part in PARTS:
        lines += [f"{part}:"]
        for b in (b for b in BENCHMARKS if b.part == part):
            lines += [f"  {b.name}: {b.about}", f"    shapes: {'; '.join(case.name for case in b.cases)}"]
            lines += [f"    tiny: {'; '.join(case.name for case in b.tiny)}"]
            lines += [f"    compared with: {'; '.join(b.compared_with)}"]
    return "\n".join(lines)


def run(options: Options) -> Results:
    """Measure what is asked for and not there yet; the file is complete after every row."""
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    results = Results.opened(options.out, options.device, options.tiny)
    for benchmark in options.benchmarks:
        cases = [case.name for case in benchmark.cases_for(options.tiny)]
        waiting = [name for name in cases if options.again or key_of(benchmark.name, name) not in results.rows]
        while waiting and time.monotonic() < end:
            done = _some(benchmark, waiting, options, results, end)
            waiting = waiting[done:]
        if waiting:
            print(f"out of time before {key_of(benchmark.name, waiting[0])}; run it again to go on", flush=True)
            break
    return results


def failed(results: Results, options: Options) -> list[str]:
    """Rows of a run that hold an error, with it. That memory runs out is an answer."""
    keys = [key_of(b.name, case.name) for b in options.benchmarks for case in b.cases_for(options.tiny)]
    errors = {key: results.rows.get(key, {}).get("error", OUT_OF_MEMORY) for key in keys}
    return [f"{key}: {error}" for key, error in errors.items() if error != OUT_OF_MEMORY]


def _some(benchmark: Benchmark, waiting: Sequence[str], options: Options, results: Results, end: float) -> int:
    """Rows of one process, until it is through, takes too long or dies; how many are settled."""
    done, limit = 0, benchmark.limit + START_SECONDS
    with tempfile.TemporaryFile("w+") as errors, _Worker(benchmark, waiting, options, errors) as worker:
        while done < len(waiting):
            left = end - time.monotonic()
            found = worker.next(min(limit, left))
            if isinstance(found, str) and found == LATE and left < limit:
                return done
            if isinstance(found, str):
                why = f"over its limit of {benchmark.limit} s" if found == LATE else _last_line(errors)
                found = {"benchmark": benchmark.name, "case": waiting[done], "error": why}
                _settle(found, results)
                return done + 1
            _settle(found, results)
            done, limit = done + 1, benchmark.limit
    return done


def _settle(row: dict[str, Any], results: Results) -> None:
    results.add(row)
    print(f"{key_of(row['benchmark'], row['case'])}\n{as_text(row)}", flush=True)


LATE, ENDED = "late", "ended"


class _Worker:
    """The process that measures; ``next`` waits for a row."""

    def __init__(self, benchmark: Benchmark, cases: Sequence[str], options: Options, errors: IO[str]) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "worker.py"), str(os.getpid())]
        command += [options.device, str(int(options.tiny)), benchmark.name, *cases]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._rows: queue.Queue[dict[str, Any] | str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, seconds: float) -> dict[str, Any] | str:
        """The next row, LATE or ENDED."""
        try:
            return self._rows.get(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
        except queue.Empty:
            return LATE

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for row in _rows_in(self._process.stdout):
            self._rows.put(row)
        self._rows.put(ENDED)


def _rows_in(lines: IO[str] | None) -> Iterator[dict[str, Any]]:
    """What a worker prints: rows, each a line behind a mark, and whatever else."""
    for line in lines or ():
        if line.startswith(ROW_MARK):
            yield json.loads(line.removeprefix(ROW_MARK))


ROW_MARK = "@row "


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = errors.read().strip().splitlines() or ["without a word"]
    return f"its process died: {lines[-1][:200]}"


def as_options(values: dict[str, Any]) -> Options:
    """From a command line's values, those not given left at their defaults."""
    known = {field.name for field in dataclasses.fields(Options)}
    return Options(**{name: value for name, value in values.items() if name in known and value is not None})
