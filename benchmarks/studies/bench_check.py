"""``fp8compile.check`` on four models: what it finds, what it proposes, the gradients after.

    python benchmarks/studies/bench_check.py --json benchmarks/results/check-cpu.json

llama      the demo's Llama, FP8 linears emulated, storage as by default; BF16 autocast
resnet18   timm's, on digits; FP32: batch norms, ReLUs, and gradients that are zero but for rounding
vit        the ViT of bench_models.py, whose first q_proj has the table's worst gradient in INT8; BF16 autocast
moe        two blocks of attention and a mixture of four experts, two for each token, whose router is a linear that
           chooses with top-k; FP8 linears emulated; FP32

Each has trained for some steps before, eagerly. The JSON is written after every model; models that are not run keep what it
says of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.batches import CLASSES, Batch, digits, next_bytes, own_loss
from benchmarks.harness.environment import environment
from benchmarks.harness.workarounds import bf16_products_in_fp32, mend_torchvision
from benchmarks.studies.measuring import in_precision, warm_up
from benchmarks.studies.models import Case, resnet18, vit
from fp8compile.extras.demo.model import SIZES, build_model


class Experts(nn.Module):
    """A router and its experts: each token goes to the two with the largest logits, weighted by their softmax."""

    def __init__(self, width: int, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits, index = self.router(x).topk(self.chosen, -1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts), device=x.device, dtype=x.dtype)
        weights = weights.scatter(-1, index, logits.softmax(-1))
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights.unsqueeze(-2)).sum(-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mixture(self.norm2(x))


class Mixture(nn.Module):
    """Patches of digits through two blocks to a class."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x.mean(1)))


def moe() -> Case:
    from benchmarks.harness.batches import cross_entropy

    torch.manual_seed(0)
    about = "2 blocks, 64 wide, attention and 2 of 4 experts, digits 8 x 64 x 64 in patches of 8"
    return Case(about, Mixture().train(), lambda number: digits(number, rows=8, size=64), cross_entropy)


def demo_llama() -> Case:
    size = SIZES["cpu"]
    model = build_model(size, 0, torch.device("cpu"))
    about = f"the demo's Llama, {size.layers} layers, hidden {size.hidden}, {size.batch} x {size.length} bytes"

    def batch(number: int) -> Batch:
        return next_bytes(number, rows=size.batch, length=size.length)

    return Case(about, model.train(), batch, own_loss)


@dataclass(frozen=True)
class Run:
    """A model, the precision of its forward (as in measuring.py) and the recipe."""

    case: Callable[[], Case]
    precision: str
    recipe: Mapping[str, Any]


RUNS: Mapping[str, Run] = {
    "llama": Run(demo_llama, "amp", {"linears.emulate": True}),
    "resnet18": Run(lambda: resnet18(0), "fp32", {}),
    "vit": Run(lambda: vit(0), "amp", {}),
    "moe": Run(moe, "fp32", {"linears.emulate": True}),
}


def row_of(run: Run, bar: float) -> dict[str, Any]:
    """One model, checked; the text of the check goes to the screen."""
    case = run.case()
    warm_up(case)
    batch = case.batch(0)
    started = time.perf_counter()
    with in_precision(run.precision) if run.precision == "amp" else contextlib.nullcontext():
        found = fp8compile.check(
            case.model,
            batch.kwargs or batch.args,
            recipe=run.recipe,
            loss=lambda output: case.loss(output, batch),
            bar=bar,
        )
    seconds = time.perf_counter() - started
    print(found, flush=True)
    after = [row.repaired for row in found.rows if not math.isnan(row.repaired) and row.verdict != "rounding"]
    return {
        "about": case.about,
        "precision": run.precision,
        "recipe": dict(run.recipe),
        "seconds": round(seconds, 1),
        "worst_after_db": min(after) if after else None,
        **json.loads(found.to_json()),
        **environment(),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="fp8compile.check on four models.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--models", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--bar", type=float, default=10.0, help="dB")
    arguments = parser.parse_args(words)
    mend_torchvision()
    bf16_products_in_fp32()
    rows: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in arguments.models:
        print(f"{name}: {RUNS[name].case().about}", flush=True)
        rows[name] = row_of(RUNS[name], arguments.bar)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
