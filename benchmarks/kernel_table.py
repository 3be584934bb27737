"""One table of kernels: what each is predicted to take on an H200, and, where there is a GPU, what it takes, beside peers.

Predictions need no GPU: they are made from counts in benchmarks/results/kernels-sm90-lowered.json, which
``python -m tests.sm90.run_kernels`` writes. With a GPU the benchmarks of kernels are run first; rows that the results file
of today holds are not measured again.

    python -m benchmarks.kernel_table [NAME ...]     a typical shape of each kernel
    python -m benchmarks.kernel_table --all          every shape
    python -m benchmarks.kernel_table --read         measures nothing; what benchmarks/results holds of a GPU stands beside
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder is all that is there

from benchmarks import suite
from benchmarks.first import readings
from benchmarks.harness import kernel_lines, kernel_reads
from benchmarks.harness.kernel_reads import Measured
from benchmarks.harness.measured_sections import load, source
from benchmarks.harness.results import FOLDER, Results, newest_on_gpu
from fp8compile._messages import nearest

PRICES = "kernels-sm90-lowered.json"
KERNELS = tuple(benchmark.name for benchmark in suite.BENCHMARKS if benchmark.part == "kernels")


def section(folder: Path) -> list[str]:
    """Of docs/results.md."""
    found = load(folder, PRICES)
    measured = on_gpu(folder, found["rows"])
    return [
        source(PRICES, found),
        "Kernels that `fp8compile bench kernels` times, one shape each and those that were read.",
        "They are lowered for sm_90 and disassembled without a GPU.",
        "Times are [predicted](#kernels-read-on-an-h200) for an H200; what is called a rate is of the least bytes or",
        "operations, and the card's are a copy's and a square matmul's. A group or a cast is by plain Inductor here.",
        *told(measured),
        "",
        *kernel_lines.lines(found["rows"], measured, whole=False),
    ]


def told(measured: Measured | None) -> list[str]:
    """Where the measured columns are from."""
    if measured is None:
        return ["No GPU was read."]
    notes = list[str]()
    if measured.few:
        notes.append("Torch and Triton there are not those of the predictions; rates of matmuls are of that card.")
        notes.append(
            "Where the host took as long as the device, the kernel took no longer (≤), and no error is given."
        )
    if measured.rewritten:
        notes.append("Nor is one where the kernel has been rewritten since.")
    return [f"Read: {measured.where}. Peers are in µs. An empty cell was not read.", *notes]


def on_gpu(folder: Path, prices: Sequence[Any]) -> Measured | None:
    """What a folder holds of a GPU: the newest results of the suite, or else the newest first contact that timed kernels."""
    if (results := newest_on_gpu(folder)) and (found := of_suite(results)).rows:
        return found
    for reading in reversed(readings.readings(folder)):
        where = f"{reading.where}, {reading.date}"
        if (read := kernel_reads.read(where, reading.commit, reading.found, prices)).rows:
            return read
    return None


def of_suite(results: Results) -> Measured:
    """The kernels of a results file."""
    rows = {key: row for key, row in results.rows.items() if row["benchmark"] in KERNELS}
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows.values()))
    where = f"{results.head['device']}, torch {results.head['versions']['torch']}, commit {commits}"
    toys = f"; {results.head['what_tiny_means']}" if results.head["tiny"] else ""
    return Measured(f"{where}, {results.head['began']}{toys}", rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status says whether a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KERNELS)} (all)")
    parser.add_argument("--all", action="store_true", help="every shape, not a typical one alone")
    parser.add_argument("--read", action="store_true", help="measure nothing; show what --out holds of a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else None)
    parser.add_argument("--tiny", action="store_true", help="toy sizes: no figure means anything")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of measured results")
    parser.add_argument("--minutes", type=float, help="measure no longer than this")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in KERNELS:
            parser.error(f"there is no benchmark {name!r} of kernels.{nearest(name, KERNELS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here. Fix: leave it out, or --device cpu --tiny")
    return _printed(args)


def _printed(args: argparse.Namespace) -> int:
    names = tuple(args.names) or KERNELS
    prices = load(FOLDER, PRICES)
    rows = [row for row in prices["rows"] if row["benchmark"] in names]
    measured, wrong = None, list[str]()
    if args.read:
        measured = on_gpu(args.out, rows)
    elif args.device:
        options = suite.Options(names, args.device, args.tiny, out=args.out, minutes=args.minutes)
        results = suite.run(options)
        measured, wrong = of_suite(results), suite.failed(results, options)
    versions = ", ".join(f"{name} {version}" for name, version in prices["versions"].items())
    print(f"Predicted for an H200 from code lowered by {versions}.", *told(measured), sep="\n", end="\n\n")
    print("\n".join(kernel_lines.lines(rows, _named(measured, names), args.all)))
    return int(bool(wrong))


def _named(measured: Measured | None, names: Sequence[str]) -> Measured | None:
    """Its rows of these benchmarks."""
    if measured is None:
        return None
    rows = {key: row for key, row in measured.rows.items() if key.split(": ")[0] in names}
    return Measured(measured.where, rows, measured.rewritten, measured.few)


if __name__ == "__main__":
    sys.exit(main())
