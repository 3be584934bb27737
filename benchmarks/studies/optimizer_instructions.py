"""What a step of AdamW takes on an H100, by format: instructions and registers, from code lowered and disassembled. No GPU.

Milliseconds are of 256M elements, predicted by benchmarks/harness/kernel_time.py. The kernel is that of one launch for many
parameters, which has one configuration (tests/sm90/optimizers.py).

python benchmarks/studies/optimizer_instructions.py [--json results.json] [FORMAT ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.output import write_json
from tests.sm90 import fake_h100
from tests.sm90.optimizers import Case, chunks_of, cost_together, lowered_chunk

ELEMENTS = 256 * 2**20
SHAPE = (1024, 4096)
FORMATS: dict[str, Any] = {
    "e4m3_expanded": "e4m3_expanded",
    "COAT's mix": ("dynamic_tree", "e4m3_expanded"),
    "dynamic_tree": "dynamic_tree",
    "int8_companded": "int8_companded",
    "4bit_log": "4bit_log",
}
DTYPES = {"BF16": torch.bfloat16, "FP32": torch.float32}


def measured(name: str, dtype: str) -> dict[str, Any]:
    """The kernel that one launch for many parameters runs."""
    chunks, least = chunks_of(Case(SHAPE, DTYPES[dtype], state_format=FORMATS[name]).build(torch.zeros))
    [chunk] = chunks
    graph, _ = lowered_chunk(chunk)
    cost = cost_together(graph, chunk[0], SHAPE[0] * SHAPE[1], ELEMENTS)
    row = {"format": name, "dtype": dtype, "over_least": graph.num_bytes / least}
    row |= {key: cost.figures[key] for key in ("instructions", "slow", "registers")}
    return row | {"spilled": cost.spilled, "predicted_ms": cost.us / 1e3}


def line(row: dict[str, Any]) -> str:
    numbers = (
        f"{row[key]:.{places}f}"
        for key, places in (("instructions", 0), ("slow", 1), ("registers", 0), ("spilled", 0), ("over_least", 2))
    )
    return f"| {row['format']} | {row['dtype']} | {' | '.join(numbers)} | {row['predicted_ms']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    fake_h100.install()
    print("| format | parameters | instructions | slow ones | registers | spilled | bytes / least | predicted ms |")
    rows = []
    for name in options.formats:
        for dtype in options.dtype:
            rows.append(measured(name, dtype))
            print(line(rows[-1]), flush=True)
    if options.json:
        what = "optimizer steps lowered for sm_90 and disassembled without a GPU; ms are predictions"
        write_json(options.json, {"what": what, "versions": {"torch": torch.__version__}, "rows": rows})


if __name__ == "__main__":
    main()
