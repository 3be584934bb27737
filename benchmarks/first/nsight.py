"""Kernels under Nsight Compute: where it is, what it is asked, and what it said as rows."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "smsp__inst_executed.sum",
    "smsp__inst_executed_pipe_xu.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "lts__t_bytes.sum",
)
"""Half of what was asked first: 242 launches took 45 s with 18 of them."""


def found() -> str | None:
    """The program."""
    there = sorted(
        str(path)
        for root, pattern in (("/opt", "nvidia/nsight-compute/*/ncu"), ("/usr/local", "cuda*/bin/ncu"))
        for path in Path(root).glob(pattern)
    )
    return shutil.which("ncu") or (there[-1] if there else None)


def command(log: Path) -> list[str]:
    """What stands before an arm's own command; nothing where there is no ncu, and the arm says so."""
    if (program := found()) is None:
        return []
    how = "--profile-from-start off --target-processes application-only --cache-control none --clock-control none"
    kernels = ["-k", "regex:triton|direct_copy|reduce_kernel"]
    said = ["--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--log-file", str(log)]
    return [program, *how.split(), *kernels, *said]


def rows(text: str) -> list[dict[str, str]]:
    """A launch each: its kernel and the metrics, as ncu wrote them; units stand in the first."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    wanted = ("Kernel Name", *METRICS)
    return [
        {name: row[name] for name in wanted if row.get(name)} for row in csv.DictReader(io.StringIO("\n".join(lines)))
    ]
