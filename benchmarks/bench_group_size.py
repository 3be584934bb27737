"""Gradient quality against the number of elements that share a scale, 64 to a whole row, in a BERT of BERT-base's width.

    python benchmarks/bench_group_size.py --json benchmarks/results/group-size-cpu.json

Storage alone, attention in 16 bit, FP32 model, rewritten graphs run node by node; SQNR of every parameter's gradient against
float64 after some steps on masked bytes. Once as trained, once with two channels of every norm's output made 20 times as
large, as trained language models have them: what a large group must stand.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import environment
from benchmarks.measuring import gradients, sqnr, zero_up_to_rounding
from benchmarks.models import VOCABULARY, Batch, masked_bytes, own_loss
from benchmarks.workarounds import mend_torchvision

WIDTH, LAYERS, ROWS, LENGTH, STEPS = 768, 2, 4, 64, 12
SIZES = (64, 128, 256, WIDTH)
OUTLIERS, FACTOR = (100, 500), 20.0


def bert() -> nn.Module:
    """Two layers, some steps from their initialisation."""
    mend_torchvision()
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(STEPS):
        loss(model, model, masked_bytes(step, ROWS, LENGTH)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def loss(model: nn.Module, run: Any, batch: Batch) -> torch.Tensor:
    return own_loss(run(*batch.args, **(batch.kwargs or {})), batch)


@torch.no_grad()
def with_outliers(model: nn.Module) -> nn.Module:
    """A copy whose norms make two channels large."""
    model = copy.deepcopy(model)
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm) and m.weight.numel() == WIDTH):
        norm.weight[list(OUTLIERS)] *= FACTOR
    return model


def quality(model: nn.Module, group_size: int) -> dict[str, float | str]:
    """Worst and median SQNR over the parameters whose gradient is not zero by construction, in dB."""
    batch = masked_bytes(STEPS, ROWS, LENGTH)
    exact = copy.deepcopy(model).double()
    reference = gradients(exact, lambda: loss(exact, exact, batch))
    options = {"preset": "conservative", "linear": "off", "group_size": group_size, "codegen": "eager"}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fp8compile", options=options)
    found = gradients(model, lambda: loss(model, compiled, batch))
    zero = set(zero_up_to_rounding(reference))
    by_name = {name: sqnr(reference[name], found[name]) for name in reference if name not in zero}
    worst = min(by_name, key=by_name.__getitem__)
    return {"worst": by_name[worst], "of": worst, "median": statistics.median(by_name.values())}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Gradient SQNR against the group size.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    plain = bert()
    rows = {
        name: {str(size): quality(model, size) for size in SIZES}
        for name, model in (("as trained", plain), ("two channels 20 times as large", with_outliers(plain)))
    }
    found = {
        **environment(),
        "about": f"BERT, {LAYERS} layers, hidden {WIDTH}, {ROWS} x {LENGTH} bytes",
        "sqnr_db": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, by_size in rows.items():
        for size, row in by_size.items():
            print(f"{name}, group of {size}: worst {row['worst']:.1f} dB ({row['of']}), median {row['median']:.1f}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
