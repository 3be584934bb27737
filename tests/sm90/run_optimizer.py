"""Script: lower and assemble the optimizer steps that are named, or all. Prints JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import fake_h100
from .measures import measured, print_json
from .optimizers import Case, chunks_of, lowered_chunk

BF16 = torch.bfloat16
CASES = {
    "FP32": Case((1024, 4096)),
    "BF16, rounded stochastically": Case((1024, 4096), BF16),
    "BF16, split": Case((1024, 4096), BF16, master="split"),
    "BF16, FP32 copy": Case((1024, 4096), BF16, master="fp32"),
    "COAT's mix": Case((1024, 4096), state_format=("dynamic_tree", "e4m3_expanded")),
    "companded": Case((1024, 4096), state_format="int8_companded"),
    "four bits": Case((1024, 4096), state_format="4bit_log"),
    "m 4, v 2 bits, BF16": Case((1024, 4096), BF16, state_format=("int4_companded", "log2")),
    "BF16, scaled FP16 copy": Case((1024, 4096), BF16, master="fp16_scaled"),
    "Lion": Case((1024, 4096), optimizer="Lion"),
    "short groups": Case((64, 64, 3, 3)),
    "kept whole": Case((2048,)),
}


def report(names: Sequence[str]) -> dict[str, Any]:
    """``{case: {"least_bytes", "chunks": [measures]}}``."""
    fake_h100.install()
    result = {}
    for name in names:
        chunks, least = chunks_of(CASES[name].build(torch.zeros))
        result[name] = {
            "least_bytes": least,
            "chunks": [
                measured(lowered_chunk((signature, [piece]))[0], counted=True)
                for signature, pieces in chunks
                for piece in pieces
            ],
        }
    return result


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or list(CASES)))
