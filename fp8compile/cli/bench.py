"""``fp8compile bench``: the benchmarks of a checkout. They are no part of the installed package, which finds them or says so.

A checkout is looked for in the current directory and above it, then beside the package (an editable install).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fp8compile
from fp8compile._messages import nearest
from fp8compile.cli.explain import WRONG, Wrong

FAILED = 1


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks, or the parts kernels, layers, e2e (all)"
    )
    parser.add_argument("--list", action="store_true", help="every benchmark, its shapes, what it is compared with")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where torch sees a GPU")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes for a CPU: to try the machinery, not to measure"
    )
    parser.add_argument("--again", action="store_true", help="measure rows too that are in the results file already")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (benchmarks/results)")
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="stop after so long; the next run goes on")


def run_bench(values: argparse.Namespace) -> int:
    try:
        suite = found_suite()
        check_names(values.names, [*suite.NAMES, *suite.PARTS])
        if values.list:
            print(suite.listing())
            return 0
        values.device = check_device(values.device)
        options = suite.as_options({**vars(values), "names": tuple(values.names)})
        check_size(options)
    except Wrong as error:
        print(f"fp8compile bench: error: {error}", file=sys.stderr)
        return WRONG
    results = suite.run(options)
    failed = suite.failed(results, options)
    print("\n".join([*map(str, suite.written(results)), *(f"failed: {line}" for line in failed)]))
    return FAILED if failed else 0


def found_suite(places: Iterable[Path] | None = None) -> Any:
    """The module ``benchmarks.suite`` of the checkout.

    Raises:
        Wrong: there is no checkout.
    """
    for place in _places() if places is None else places:
        if (place / "benchmarks" / "suite.py").is_file() and (
            place / "passes"
        ).is_dir():  # ours, not another project's
            sys.path.append(str(place))
            return importlib.import_module("benchmarks.suite")
    raise Wrong(
        f"there is no folder benchmarks/ in {Path.cwd()}, above it or beside the package: the benchmarks are not part of "
        "the installed package. Cure: run this in a checkout of fp8compile."
    )


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is none, with the nearest that is."""
    for name in names:
        if name not in known:
            raise Wrong(f"there is no benchmark {name!r}.{nearest(name, known)}")


def check_device(asked: str | None) -> str:
    """The device to run on: as asked, or the GPU if there is one."""
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise Wrong("--device 'cuda': torch sees no GPU here. Cure: --device cpu --tiny, or a torch built for CUDA.")
    return asked or ("cuda" if there else "cpu")


def check_size(options: Any) -> None:
    """Refuse on a CPU what would take hours and more memory than there is."""
    large = [b.name for b in options.benchmarks if b.part != "kernels"]
    if options.device == "cpu" and not options.tiny and large:
        raise Wrong(f"{large[0]!r} at full size needs a GPU. Cure: --tiny, or name kernels alone.")


def _places() -> Iterator[Path]:
    here = Path.cwd()
    yield from (here, *here.parents)
    yield Path(fp8compile.__file__).resolve().parent.parent


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value
