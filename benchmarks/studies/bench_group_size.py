"""Gradient quality against the number of elements that share a scale, 64 to a whole row, in a BERT of BERT-base's width.

    python benchmarks/studies/bench_group_size.py --json benchmarks/results/group-size-cpu.json

Storage alone, attention in 16 bit, FP32 model, rewritten graphs run node by node; SQNR of every parameter's gradient against
float64 after some steps on masked bytes. Once as trained, once with two channels of every norm's output made 20 times as
large, as trained language models have them: what a large group must stand.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import environment
from benchmarks.studies.measuring import call, gradients, quality, reference_gradients, warm_up, zero_up_to_rounding
from benchmarks.studies.models import Case, bert_of

WIDTH = 768
SIZES = (64, 128, 256, WIDTH)
OUTLIERS, FACTOR = (100, 500), 20.0


@torch.no_grad()
def with_outliers(case: Case) -> Case:
    """A copy whose norms make two channels large."""
    model = copy.deepcopy(case.model)
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm) and m.weight.numel() == WIDTH):
        norm.weight[list(OUTLIERS)] *= FACTOR
    return dataclasses.replace(case, model=model)


def by_group_size(case: Case) -> dict[str, Any]:
    """Worst and median SQNR, in dB, over the parameters whose gradient is not zero by construction."""
    reference, batch = reference_gradients(case), case.batch(0)
    zero, found = zero_up_to_rounding(reference), {}
    for size in SIZES:
        torch._dynamo.reset()
        options = {"saved.attention": False, "linears": "off", "saved.group_size": size, "debug.codegen": "eager"}
        run = torch.compile(case.model, backend="fp8compile", options=options)
        got = gradients(case.model, lambda run=run: case.loss(call(run, batch, "fp32"), batch))  # type: ignore[misc]
        found[str(size)] = quality(reference, got, zero).summary()
    return found


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Gradient SQNR against the group size.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    case = bert_of(0, WIDTH, layers=2, rows=4, length=64, head=64)
    warm_up(case)
    rows = {
        "as trained": by_group_size(case),
        "two channels 20 times as large": by_group_size(with_outliers(case)),
    }
    found = {**environment(), "about": case.about, "sqnr_db": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, by_size in rows.items():
        for size, row in by_size.items():
            worst = f"worst {row['worst_db']:.1f} dB ({row['worst_parameter']})"
            print(f"{name}, group of {size}: {worst}, median {row['median_db']:.1f}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
