"""Saved bytes and gradients in two to six bits per element: a Llama layer in each choice of bits, and five models.

    python benchmarks/studies/bench_few_bits.py --json benchmarks/results/few-bits-cpu.json

Storage alone, rewritten graphs run node by node. The layer is that of tests/system/test_layer.py (hidden 512, ffn 1376, 8
heads, 2 x 256 tokens, BF16, as initialised), each gradient beside float64's for a random projection of the result. That is
the worst case for noise that is unbiased: nothing adds up over tokens. Models run under BF16 autocast after some
warm-up steps, as in bench_models.py; beside ours stand plain Inductor's graphs and the 8 bits of "auto".

The JSON is written after every model; parts that are not run keep what it says of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.harness.workarounds import bf16_products_in_fp32
from benchmarks.studies.measuring import (
    Measured,
    Way,
    build,
    measure,
    quality,
    reference_gradients,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.studies.models import MODELS, Case

Options = Mapping[str, Any]

NAMED = ("vit", "bert", "t5", "gpt2", "llama")
EACH_MODULE = {"gate": {"saved": "4bit"}, "o": {"saved": "2bit"}}
LAYER: Mapping[str, Options] = {
    "auto": {},
    **{f"{b}bit, attention in 8": {"saved": f"{b}bit"} for b in (6, 5, 4, 3, 2)},
    **{f"{b}bit": {"saved": f"{b}bit", "saved.attention_format": f"{b}bit"} for b in (6, 5, 4, 3, 2)},
    **{
        f"{b}bit, attention in 8, groups of {size}": {"saved": f"{b}bit", "saved.group_size": size}
        for b in (4, 3, 2)
        for size in (64, 32)
    },
    "4bit, attention in 6": {"saved": "4bit", "saved.attention_format": "6bit"},
    "5bit, gate 4, o 2": {"saved": "5bit", "saved.attention_format": "5bit", "modules": EACH_MODULE},
    "5bit, gate 4, o 2, attention in 6 but for v": {
        "saved": "5bit",
        "saved.attention_format": "6bit",
        "modules": {**EACH_MODULE, "v": {"saved.attention_format": "5bit"}},
    },
    "5bit, gate 4, up 4, o 2": {
        "saved": "5bit",
        "saved.attention_format": "5bit",
        "modules": {**EACH_MODULE, "up": {"saved": "4bit"}},
    },
}
WAYS: Mapping[str, Options] = {
    "auto": {},
    "6bit": {"saved": "6bit", "saved.attention_format": "6bit"},
    "4bit, attention in 6": {"saved": "4bit", "saved.attention_format": "6bit"},
    "4bit": {"saved": "4bit"},
    "3bit": {"saved": "3bit"},
    "2bit": {"saved": "2bit"},
}


def layer_rows() -> dict[str, Any]:
    """By choice of bits: saved bytes in units of the layer's input, worst and median SQNR of its gradients."""
    from tests.support.measure import compiled, gradient_sqnr, kept_bytes, llama_case

    layer, args = llama_case()
    unit, rows = args[0].numel() * 2, {}
    for name, options in LAYER.items():
        torch._dynamo.reset()
        fn = compiled(layer, linears="off", **options)
        kept, found = kept_bytes(layer, fn, args), gradient_sqnr(layer, fn, args)
        worst = min(found, key=found.__getitem__)
        rows[name] = {
            "options": dict(options),
            "units": kept / unit,
            "worst_db": found[worst],
            "worst_parameter": worst,
            "median_db": median(found.values()),
        }
        print(f"{name}: {kept / unit:.2f} U, worst {found[worst]:.1f} dB ({worst})", flush=True)
    return rows


def model_row(name: str) -> dict[str, Any]:
    """By way: bytes saved for the backward, worst and median SQNR of the gradients."""
    case = MODELS[name](0)
    warm_up(case)
    reference = reference_gradients(case)
    zero, rows = zero_up_to_rounding(reference), {}
    for way in ("plain", *WAYS):
        found = _measured(case, way)
        rows[way] = {
            "saved_bytes": sum(kept.nbytes for kept in found.kept),
            "bits": _counts(found),
            **quality(reference, found.gradients, zero).summary(),
        }
        print(f"{name} {way}: {rows[way]['saved_bytes']} bytes, worst {rows[way]['worst_db']:.1f} dB", flush=True)
    return {"about": case.about, "ways": rows}


@dataclass(frozen=True)
class Chosen(Way):
    """Storage alone, in bits of one's own choice."""

    chosen: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return {"linears": "off", **dict(self.chosen)}


def _measured(case: Case, way: str) -> Measured:
    chosen = Way(way, "eager") if way == "plain" else Chosen("auto", "eager", tuple(WAYS[way].items()))
    return measure(case, build(case, chosen, "amp"))


def _counts(found: Measured) -> dict[str, int]:
    """How many tensors are stored in which format."""
    saved = found.report.saved if found.report else ()
    return dict(Counter(each.codec.split(" ")[0] for each in saved))


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Saved bytes and gradients in few bits.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=list(NAMED), choices=list(MODELS))
    parser.add_argument("--no-layer", action="store_true", help="models alone")
    arguments = parser.parse_args(words)
    bf16_products_in_fp32()
    path = arguments.json
    before = json.loads(path.read_text()) if path and path.exists() else {"models": {}}
    found = {**before, **environment()}

    def keep() -> None:
        if path:
            write_json(path, found)

    if not arguments.no_layer:
        found["layer"] = layer_rows()
        keep()
    for name in arguments.models:
        found["models"][name] = model_row(name)
        keep()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
