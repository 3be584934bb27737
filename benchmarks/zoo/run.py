"""Every model of the zoo through fp8compile, each in a process of its own; the results file is valid JSON at any moment.

    python benchmarks/zoo/run.py --json benchmarks/results/zoo-cpu.json
    python benchmarks/zoo/run.py --json ... --only llama      models whose name or family holds the word
    python benchmarks/zoo/run.py --json ... --subset          the models that CI runs
    python benchmarks/zoo/run.py --list                       names, by family

A model whose row is there, measured at the same commit with the same versions and images, is not measured again (``--again``
does). One that takes longer than ``--limit`` seconds, or whose process dies, gets a row that says so. Packages that are not
installed are left out: transformers, timm and diffusers each bring a family.

``--codegen eager`` (default) runs the rewritten graphs node by node, without Inductor's kernels: the same graphs, codes and
bytes, no C++ compiler. ``--codegen inductor`` writes rows of its own, ``NAME/inductor``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.batches import DIGITS, digits_source
from benchmarks.harness.environment import environment
from benchmarks.harness.results import finite
from benchmarks.harness.workarounds import bf16_products_in_fp32, mend_torchvision
from benchmarks.zoo.measured import STEPS, crash, row_of
from benchmarks.zoo.registry import SUBSET, ZooModel, models

LIMIT = 300  # seconds for a model
NO_DIGITS = (
    "The zoo's images are scikit-learn's digits, which cannot be imported: pip install scikit-learn. With --made-up-images "
    "other images take their place, and rows of models with images cannot be compared with those on the page."
)
Measure = Callable[[Connection, ZooModel, argparse.Namespace], None]


def chosen(zoo: Mapping[str, ZooModel], only: Sequence[str], subset: bool) -> list[ZooModel]:
    """The models asked for, in the zoo's order.

    Raises:
        ValueError: a word that no model's name or family holds.
    """
    for word in only:
        if not any(word in f"{m.family} {m.name}" for m in zoo.values()):
            raise ValueError(f"no model of the zoo has {word!r} in its name or family. Fix: --list shows them.")
    found = [m for m in zoo.values() if not only or any(word in (m.family, m.name) for word in only)]
    found = found or [m for m in zoo.values() if any(word in m.name for word in only)]
    return [m for m in found if not subset or m.name in SUBSET]


def stamp(model: ZooModel) -> dict[str, Any]:
    """What a row must share with this run to be good still: the commit, the versions that its family depends on, and
    where images come from."""
    found = environment()
    versions = {name: found["versions"][name] for name in ("python", "torch", "fp8compile")}
    if model.family != "plain":
        versions[model.family] = importlib.metadata.version(model.family)
    return {"commit": found["commit"], "versions": versions, "images": found["images"], "date": found["date"]}


def good_still(row: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Whether a row was measured at this commit with these versions on these images."""
    return row is not None and all(
        row["measured"].get(name) == now[name] for name in ("commit", "versions", "images")
    )


# ----------------------------------------------------------------------------------------------- one process


def alone(model: ZooModel, arguments: argparse.Namespace, measure: Measure | None = None) -> dict[str, Any]:
    """What ``measure`` finds of a model in a process of its own (its row), or what became of the process."""
    context = multiprocessing.get_context("fork")  # packages are imported once; nothing is computed before
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=measure or _measure, args=(there, model, arguments))
    process.start()
    there.close()
    row: dict[str, Any] | None = None
    with contextlib.suppress(EOFError):
        row = here.recv() if here.poll(arguments.limit) else _failed(model, f"over its limit of {arguments.limit} s")
    if row is not None and "process" in row.get("errors", {}):
        process.kill()
    process.join()
    return row or _failed(model, f"its process ended with {process.exitcode}")


def _failed(model: ZooModel, text: str) -> dict[str, Any]:
    error = {"type": "process", "text": text, "where": []}
    return {"family": model.family, "note": model.note, "errors": {"process": error}}


def quietly() -> None:
    """How every model is run: on one thread, without warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bf16_products_in_fp32()


def _measure(answer: Connection, model: ZooModel, arguments: argparse.Namespace) -> None:
    quietly()
    try:
        with model.settings():
            row = row_of(model, arguments.seeds, arguments.steps, arguments.codegen)
    except Exception as error:  # before the first arm: the model itself
        row = {**_failed(model, ""), "errors": {"model": crash(error)}}
    answer.send(finite(row))


# --------------------------------------------------------------------------------------------- command line


def write(path: Path, document: Mapping[str, Any]) -> None:
    """The whole file, or none of it; a row is a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in document["rows"].items())
    head = json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=1)
    partial.write_text(f'{head[:-2]},\n "rows": {{\n{rows}\n}}\n}}\n')
    partial.replace(path)


def measured(zoo: Sequence[ZooModel], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results file with a row for each of these models; written after each."""
    path, document = arguments.json, {**environment(), "threads": 1, "rows": {}}
    for number, model in enumerate(zoo, 1):
        now = stamp(model)
        key = model.name if arguments.codegen == "eager" else f"{model.name}/{arguments.codegen}"
        if not arguments.again and good_still(_rows(path).get(key), now):
            continue
        row = {**alone(model, arguments), "measured": now}
        document["rows"] = {**_rows(path), key: row}  # read again: another run may have added to it
        write(path, document)
        print(f"{number}/{len(zoo)} {line(key, row)}", flush=True)
    return document


def _rows(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def line(key: str, row: Mapping[str, Any]) -> str:
    """A row in a line."""
    if row["errors"]:
        return f"{key}: " + "; ".join(
            f"{arm}: {each['text'].splitlines()[-1]}" for arm, each in row["errors"].items()
        )
    db, gaps = row["db"]["ours"], row["gap"]
    quality = f"{db['worst']:.1f}/{db['median']:.1f} dB" if db else "no gradient determined"
    return (
        f"{key}: {row['graphs']} graphs, "
        f"{row['products_fp8']}/{row['products_told']} products, "
        f"{row['saved_before']} -> {row['saved_after']} bytes, {quality}, "
        f"gap {gaps['ours']['mean']:+.2%}, off {gaps['off']['mean']:+.2%}"
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The zoo: many small models through fp8compile.")
    parser.add_argument("--json", type=Path, help="the results file, read and added to")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="names, families, or parts of names")
    parser.add_argument("--subset", action="store_true", help="the models that CI runs")
    parser.add_argument("--list", action="store_true", help="show the models and end")
    parser.add_argument("--again", action="store_true", help="measure models whose rows are good still")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--made-up-images", action="store_true", help="go on without scikit-learn's digits")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for a model")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    mend_torchvision()
    zoo = chosen(models(), arguments.only, arguments.subset)
    if arguments.list:
        print("\n".join(f"{model.family:13} {model.name}" for model in zoo))
        return 0
    if arguments.json is None:
        raise SystemExit("--json FILE says where the results go.")
    if not arguments.made_up_images and digits_source() != DIGITS:
        raise SystemExit(NO_DIGITS)
    rows = measured(zoo, arguments)["rows"]
    return int(any(row["errors"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
