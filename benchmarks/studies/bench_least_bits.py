"""The fewest bytes of a Llama layer for a quality of its gradients: every choice of bits for its saved values.

    python benchmarks/studies/bench_least_bits.py --json benchmarks/results/least-bits-cpu.json

The layer is that of bench_few_bits.py. Each value is stored alone in each format that it may have, and each parameter's
squared error beside float64 is measured. Errors of several values are taken to add up. The sums of all choices are formed,
and for each number of bytes the choice whose worst gradient is best is measured as a whole, beside its prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from benchmarks.harness.workarounds import bf16_products_in_fp32
from fp8compile.recipe.saved_bits import WHOLE, SavedBits, SavedValue
from tests.support.measure import compiled, gradient_sqnr, kept_bytes, llama_case

UNITS = (3.1, 3.2, 3.3, 3.4, 3.5, 3.75, 4.0, 4.5)
Values = tuple[SavedValue, ...]


class Layer:
    """A layer whose saved values are chosen one by one.

    Attributes:
        whole: its values, all exact.
    """

    def __init__(self) -> None:
        self.layer, self.args = llama_case()
        recipe = fp8compile.Recipe(linears="off")
        chosen = fp8compile.tools.calibrate_bits(
            self.layer, [self.args], recipe=recipe, loss=_projected, measured=(4,)
        )
        values: Values = chosen.saved.bits.values  # type: ignore[union-attr]
        self.whole = tuple(dataclasses.replace(value, chosen=WHOLE) for value in values)

    def measured(self, values: Values) -> tuple[Tensor, float]:
        """Each gradient's squared error, of its own size, and units of the layer's input that are saved."""
        torch._dynamo.reset()
        fn = compiled(self.layer, linears="off", **{"saved.bits": SavedBits(values)})
        found = gradient_sqnr(self.layer, fn, self.args)
        kept = kept_bytes(self.layer, fn, self.args) / (2 * self.args[0].numel())
        return torch.tensor([10 ** (-db / 10) for db in found.values()], dtype=torch.float64), kept


def _projected(y: Tensor) -> Tensor:
    random = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    return (y.float() * random).sum()


def formats_of(value: SavedValue) -> list[str]:
    return [name for name, _ in value.choices if name != WHOLE]


def with_formats(values: Values, at: Sequence[int]) -> Values:
    """The values in the formats with these numbers among those that each may have."""
    pairs = zip(values, at, strict=True)
    return tuple(dataclasses.replace(value, chosen=formats_of(value)[i]) for value, i in pairs)


def sums(layer: Layer) -> tuple[Tensor, Tensor]:
    """Of every choice, in the order of its formats' numbers: the largest of its gradients' errors, and its units."""
    errors, units = layer.measured(layer.whole)
    exact, all_errors, all_units = (errors, units), errors[None], torch.tensor([units], dtype=torch.float64)
    for at, value in enumerate(layer.whole):
        alone = []
        for name in formats_of(value):
            changed = [*layer.whole]
            changed[at] = dataclasses.replace(value, chosen=name)
            alone.append(layer.measured(tuple(changed)))
        more = torch.stack([each - exact[0] for each, _ in alone])
        less = torch.tensor([each - exact[1] for _, each in alone], dtype=torch.float64)
        all_errors = (all_errors[:, None] + more).flatten(0, 1)
        all_units = (all_units[:, None] + less).flatten()
    return all_errors.amax(1), all_units


def rows(layer: Layer) -> dict[str, Any]:
    """For each number of units the choice whose worst gradient is predicted to be best, and how it is measured."""
    errors, units = sums(layer)
    found: dict[str, Any] = {"choices": len(errors), "best": []}
    shape = [len(formats_of(value)) for value in layer.whole]
    for most in UNITS:
        at = int(torch.where(units <= most + 1e-9, errors, math.inf).argmin())
        values = with_formats(layer.whole, [int(i) for i in torch.unravel_index(torch.tensor(at), shape)])
        measured, kept = layer.measured(values)
        row = {"at_most": most, "units": kept, "predicted_db": _db(errors[at]), "worst_db": _db(measured.max())}
        found["best"].append({**row, "formats": {str(value.key): value.chosen for value in values}})
        print(row, flush=True)
    return found


def _db(error: Tensor) -> float:
    return -10 * math.log10(float(error))


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="The fewest bytes for a quality of gradients.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    bf16_products_in_fp32()
    found = {**environment(), **rows(Layer())}
    if arguments.json:
        write_json(arguments.json, found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main()["choices"]))
