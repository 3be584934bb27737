"""The command line of a benchmark's own script: its rows, in this process, printed and, with --json, written."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.environment import commit
from benchmarks.harness.markdown import notes
from benchmarks.harness.results import head
from benchmarks.harness.timing import reason
from benchmarks.registry import Benchmark, Case, Row, Setting
from fp8compile._messages import nearest


def run_alone(benchmarks: Sequence[Benchmark], doc: str | None, argv: Sequence[str] | None = None) -> dict[str, Row]:
    """Measure every case of ``benchmarks``; returns the rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes: the machinery is tried, no figure means anything"
    )
    parser.add_argument("--case", action="append", help="one of the shapes (repeat for more); all of them by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here. Fix: --device cpu --tiny")
    cases = [(b, case) for b in benchmarks for case in b.cases_for(args.tiny)]
    for name in args.case or ():
        if name not in (known := [case.name for _, case in cases]):
            parser.error(f"there is no case {name!r}.{nearest(name, known)}")
    setting = Setting.on(args.device, args.tiny)
    rows: dict[str, Row] = {}
    for benchmark, case in cases:
        if args.case and case.name not in args.case:
            continue
        rows[f"{benchmark.name}: {case.name}"] = row = measured_row(benchmark, case, setting)
        print(f"{benchmark.name}: {case.name}\n{as_text(row)}", flush=True)
        if args.json:
            document = {**head(args.device, args.tiny), "commit": commit(), "rows": rows}
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    return rows


def measured_row(benchmark: Benchmark, case: Case, setting: Setting) -> Row:
    """The row of a case, or why there is none; nothing is left over from the row before."""
    torch._dynamo.reset()
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    head: dict[str, Any] = {"benchmark": benchmark.name, "case": case.name, "shape": dict(case.shape)}
    try:
        return {**head, **benchmark.measure(case, setting)}
    except Exception as error:
        return {**head, "error": reason(error)}


def as_text(row: Row) -> str:
    """A row for a terminal."""
    lines = [f"  {row['error']}"] if "error" in row else []
    for arm, laps in row.get("arms", {}).items():
        lines += [f"  {arm:26s} {name:10s} {_lap_text(lap)}" for name, lap in laps.items()]
    noted = dict.fromkeys(
        [*row.get("memory", {}), *row.get("state_bits_per_parameter", {}), *row.get("capacity", {})]
    )
    lines += [f"  {arm:26s} {', '.join(notes(row, arm))}" for arm in noted]
    lines += [f"  {arm:26s} left out: {why}" for arm, why in row.get("left_out", {}).items()]
    return "\n".join(lines)


def _lap_text(lap: dict[str, float]) -> str:
    shares = {"share_of_copy": "of the copy", "share_of_gemm": "of the product"}
    parts = [f"{lap[name]:.0%} {words}" for name, words in shares.items() if name in lap]
    return f"{lap['seconds'] * 1e3:10.3f} ms  {', '.join(parts)}"
