"""The table of formats, part by part: bytes, a layer's saved bytes and gradients, five models' gradients, lowered, unbiased.

    python benchmarks/studies/bench_formats.py
    python benchmarks/studies/bench_formats.py --parts models --models vit bert

bytes     of one encoded element, scales included (``formats.bytes_per_element``)
lowered   the Llama layer of tests/sm90/run_linears.py for an H100, without one: kernels, and the bytes that they move
layer     the same layer on the CPU: what it saves, and its gradients beside float64's, as in bench_few_bits.py
models    bench_few_bits.py's five models after some steps, under BF16 autocast: gradients beside float64's
unbiased  every finite value of a half dtype below 2^127, 10,000 draws: the largest mean error of one value, in steps

Demo gaps are bench_format_training.py's. What the JSON already has is not measured again; it is written after every cell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.harness.workarounds import bf16_products_in_fp32
from benchmarks.studies.bench_few_bits import NAMED
from benchmarks.studies.formats import PLAIN, PUBLISHED, ROWS, bytes_per_element
from benchmarks.studies.measuring import (
    Way,
    build,
    measure,
    quality,
    reference_gradients,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.studies.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
DRAWS = 10_000
HALF = {"FP16": torch.float16, "BF16": torch.bfloat16}
Keep = Callable[[], None]


@dataclass(frozen=True)
class Row(Way):
    """A row of the table, run node by node."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(ROWS[self.name])


def lowered(found: dict[str, Any], keep: Keep) -> None:
    """By row: forward and backward, each with launches, bytes, externs, their bytes, and the products' names."""
    from tests.sm90.subprocesses import result_of

    for name in (PLAIN, *ROWS):
        if name not in found:
            told = result_of("run_formats", name)
            graphs = [
                {**graph, "products": sorted({p[0] for p in graph["products"]})} for graph in told["rows"][name]
            ]
            found[name] = {"versions": told["versions"], "unit_bytes": told["unit_bytes"], "graphs": graphs}
            keep()
            print(f"lowered {name}: {[(g['launches'], g['num_bytes']) for g in graphs]}", flush=True)


def layer(found: dict[str, Any], keep: Keep) -> None:
    """By row: saved bytes in units of the layer's input, worst and median SQNR of its gradients."""
    from tests.support.measure import gradient_sqnr, kept_bytes, llama_case

    for name in (PLAIN, *ROWS):
        if name not in found:
            torch._dynamo.reset()
            case, args = llama_case()
            fn = Way(PLAIN, "eager").compile(case) if name == PLAIN else Row(name, "eager").compile(case)
            kept, by_parameter = kept_bytes(case, fn, args), gradient_sqnr(case, fn, args)
            worst = min(by_parameter, key=by_parameter.__getitem__)
            found[name] = {
                "units": kept / (args[0].numel() * 2),
                "worst_db": by_parameter[worst],
                "worst_parameter": worst,
                "median_db": median(by_parameter.values()),
            }
            keep()
            print(f"layer {name}: {found[name]['units']:.2f} U, worst {by_parameter[worst]:.1f} dB", flush=True)


def models(found: dict[str, Any], keep: Keep, names: Sequence[str]) -> None:
    """By model and row: bytes saved, worst and median SQNR of the gradients."""
    for model in names:
        rows = found.setdefault(model, {})
        if all(name in rows for name in (PLAIN, *ROWS)):
            continue
        case = MODELS[model](0)
        warm_up(case)
        reference = reference_gradients(case)
        zero = zero_up_to_rounding(reference)
        for name in (PLAIN, *ROWS):
            if name not in rows:
                way = Way(PLAIN, "eager") if name == PLAIN else Row(name, "eager")
                got = measure(case, build(case, way, "amp"))
                saved = sum(kept.nbytes for kept in got.kept)
                rows[name] = {"saved_bytes": saved, **quality(reference, got.gradients, zero).summary()}
                keep()
                print(f"{model} {name}: worst {rows[name]['worst_db']:.1f} dB", flush=True)


def unbiased(found: dict[str, Any], keep: Keep) -> None:
    """By dtype and bits: the largest mean error over draws of any value, in steps, and what chance allows."""
    from fp8compile.numerics.few_bits import BITS, FewBits
    from tests.numerics.test_few_bits import hoeffding, largest_mean_error

    allowed = hoeffding(DRAWS, 65536) + 2.0**-13
    for name, dtype in HALF.items():
        rows = found.setdefault(name, {})
        for bits in (bits for bits in BITS if str(bits) not in rows):
            error = largest_mean_error(FewBits(bits, 128, "dithered"), dtype, DRAWS)
            rows[str(bits)] = {"largest_mean_error": error, "allowed": allowed}
            keep()
            print(f"{name}, {bits} bits: {error:.5f} steps, {allowed:.5f} allowed", flush=True)


PARTS = ("bytes", "lowered", "layer", "models", "unbiased")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="The table of formats.")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/formats-cpu.json")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="*", default=list(NAMED), choices=list(MODELS))
    arguments = parser.parse_args(words)
    bf16_products_in_fp32()
    path = arguments.json
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def keep() -> None:
        write_json(path, found)

    found |= {**environment(), "draws": DRAWS, "bytes": bytes_per_element(), "published": dict(PUBLISHED)}
    run: dict[str, Callable[..., None]] = {"lowered": lowered, "layer": layer, "models": models, "unbiased": unbiased}
    for part in arguments.parts:
        if part != "bytes":
            run[part](found.setdefault(part, {}), keep, *([arguments.models] if part == "models" else []))
        keep()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
