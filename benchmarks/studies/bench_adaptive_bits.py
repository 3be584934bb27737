"""Adaptive bits of saved activations beside the same bits for all, at equal bytes: five models.

    python benchmarks/studies/bench_adaptive_bits.py --json benchmarks/results/adaptive-bits-cpu.json

Models under BF16 autocast after some warm-up steps, storage alone, as in bench_few_bits.py; attention's tensors are in few
bits too. ``calibrate_bits`` measures on batches that no gradient below is taken of. An error is |g - g'|^2 of all gradients
together over |g|^2, or of one parameter's, beside float64 and in dB, mean over batches. "exact" saves everything in its own
dtype: what BF16 itself costs.

The JSON is written after every model; models that are not run keep what it says of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.harness.workarounds import bf16_products_in_fp32
from benchmarks.studies.bench_few_bits import NAMED, Chosen
from benchmarks.studies.measuring import (
    Built,
    build,
    call,
    gradients,
    in_precision,
    kept_storages,
    reference_gradients,
    warm_up,
    zero_up_to_rounding,
)
from benchmarks.studies.models import MODELS, Case
from fp8compile.numerics.metrics import decibels, power
from fp8compile.recipe.saved_bits import BITS, SavedBits

BUDGETS = (3, 4, 5)
MEASURED_ON = (901, 902)  # batches; those of the gradients are
BATCHES = (0, 50)
NO_VALUE = 10**12  # elements: no value is as large


def model_row(name: str) -> dict[str, Any]:
    """By way: bytes saved for the backward, the error of all gradients together, worst and median parameter."""
    case = MODELS[name](0)
    warm_up(case)
    started = time.perf_counter()
    bits = chosen_for(case)
    seconds = time.perf_counter() - started
    references = {number: reference_gradients(case, number) for number in BATCHES}
    ways: dict[str, Mapping[str, Any]] = {"exact": {"saved.min_numel": NO_VALUE}, "auto": {}}
    for budget in BUDGETS:
        few = f"{budget}bit"
        ways[f"uniform {budget}"] = {"saved": few, "saved.attention_format": few}
        ways[f"adaptive {budget}"] = {"saved.bits": bits.within(bits=budget)}
    rows = {}
    for way, options in ways.items():
        rows[way] = errors_of(case, options, references)
        print(f"{name} {way}: {rows[way]['saved_bytes']} bytes, {rows[way]['total_db']:.1f} dB", flush=True)
    for budget in BUDGETS:
        rows[f"adaptive {budget}"] |= predicted(bits.within(bits=budget))
        rows[f"uniform {budget}"] |= predicted(bits.uniform(budget))
    return {"about": case.about, "seconds_of_measuring": seconds, "law": law_of(bits), "ways": rows}


def chosen_for(case: Case) -> SavedBits:
    """What the values of a model are measured to need; the budget is chosen later."""
    batches = [case.batch(number) for number in MEASURED_ON]
    given = [batch.kwargs or batch.args for batch in batches]
    waiting = iter(batches)
    with in_precision("amp"):
        recipe = fp8compile.tools.calibrate_bits(
            case.model, given, recipe={"linears": "off"}, loss=lambda output: case.loss(output, next(waiting))
        )
    found: SavedBits = recipe.saved.bits
    return found


def errors_of(case: Case, options: Mapping[str, Any], references: Mapping[int, Any]) -> dict[str, Any]:
    """Of one way to store, over the batches of ``references``."""
    built = build(case, Chosen("auto", "eager", tuple(options.items())), "amp")
    found = [_of_batch(case, built, number, exact) for number, exact in references.items()]
    by_parameter = {name: fmean(each[name] for _, each in found) for name in found[0][1]}
    worst = min(by_parameter, key=by_parameter.__getitem__)
    batch = case.batch(BATCHES[0])
    kept = kept_storages(built.model, lambda: call(built.run, batch, "amp"), batch)
    return {
        "saved_bytes": sum(each.nbytes for each in kept),
        "total_db": decibels(1.0, fmean(error for error, _ in found)),
        "worst_db": by_parameter[worst],
        "worst_parameter": worst,
        "median_db": median(by_parameter.values()),
    }


def _of_batch(case: Case, built: Built, number: int, exact: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """The error of all gradients of a batch together, and each parameter's in dB."""
    batch = case.batch(number)
    got = gradients(built.model, lambda: case.loss(call(built.run, batch, "amp"), batch))
    errors = {name: power(got[name] - g) for name, g in exact.items()}
    powers = {name: power(g) for name, g in exact.items()}
    zero = zero_up_to_rounding(dict(exact))
    each = {name: decibels(powers[name], errors[name]) for name in exact if name not in zero}
    return sum(errors.values()) / sum(powers.values()), each


def predicted(bits: SavedBits) -> dict[str, Any]:
    """What the measurements say of a choice: the sum of its values' errors; how many values have which format."""
    counts = Counter(value.chosen for value in bits.values)
    return {
        "predicted_db": decibels(1.0, bits.error),
        "formats": {name: counts[name] for name in BITS if counts[name]},
    }


def law_of(bits: SavedBits) -> dict[str, list[float]]:
    """By format: errors over what the square of the step makes of four bits, in dB: the 10 %, 50 % and 90 % of values."""
    found: dict[str, list[float]] = {}
    for name, width in BITS.items():
        ratios = []
        for value in bits.values:
            known = dict(value.choices)
            if name in known and "4bit" in known and name != "exact" and known["4bit"].error:
                law = known["4bit"].error * (15 / (2**width - 1)) ** 2
                ratios.append(decibels(known[name].error, law))
        ratios.sort()
        if ratios:
            found[name] = [ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9)]
    return found


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Adaptive bits beside uniform ones at equal bytes.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=list(NAMED), choices=list(MODELS))
    arguments = parser.parse_args(words)
    bf16_products_in_fp32()
    path = arguments.json
    before = json.loads(path.read_text()) if path and path.exists() else {"models": {}}
    found = {**before, **environment()}
    for name in arguments.models:
        found["models"][name] = model_row(name)
        if path:
            write_json(path, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
