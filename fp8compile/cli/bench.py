"""``fp8compile bench``: the benchmarks of a checkout. They are not part of the installed package.

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
from fp8compile.cli.ends import DONE, FAILED, WRONG, Wrong, said
from fp8compile.cli.width import fitted


def run_bench(values: argparse.Namespace) -> int:
    try:
        suite = found_suite()
        check_names(values.names, [*suite.NAMES, *suite.PARTS])
        if values.list:
            print(fitted(suite.listing()))
            return DONE
        values.device = check_device(values.device)
        options = suite.as_options({**vars(values), "names": tuple(values.names)})
        check_size(options)
    except Wrong as error:
        return said("bench", error, WRONG)
    results = suite.run(options)
    failed = suite.failed(results, options)
    print("\n".join([*map(str, suite.written(results)), *(f"failed: {line}" for line in failed)]))
    return FAILED if failed else DONE


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
        "the installed package. Fix: run this in a checkout of fp8compile."
    )


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an unknown name; the error gives the nearest known one."""
    for name in names:
        if name not in known:
            raise Wrong(f"there is no benchmark {name!r}.{nearest(name, known)}")


def check_device(asked: str | None) -> str:
    """The device to run on: as asked, or the GPU if there is one."""
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise Wrong("--device 'cuda': torch sees no GPU here. Fix: --device cpu --tiny, or a torch built for CUDA.")
    return asked or ("cuda" if there else "cpu")


def check_size(options: Any) -> None:
    """Refuse, on a CPU, sizes that would take hours and more memory than there is."""
    large = [b.name for b in options.benchmarks if b.part != "kernels"]
    if options.device == "cpu" and not options.tiny and large:
        raise Wrong(f"{large[0]!r} at full size needs a GPU. Fix: --tiny, or name kernels alone.")


def _places() -> Iterator[Path]:
    here = Path.cwd()
    yield from (here, *here.parents)
    yield Path(fp8compile.__file__).resolve().parent.parent
