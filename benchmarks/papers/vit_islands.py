"""A ViT whose early attention leaves FP16's range: where an FP32 island is needed, and which way to get it helps.

    FP32                nothing is 16 bit
    off                 FP16 throughout
    auto                islands by the list and the range analysis, which cannot know how large weights are
    calibrated          islands where a calibration on two batches found values that do not fit
    block 0 in FP32     fp32.keep: the cure by hand, one layer of the model

The first block's query and key weights are 400 times as large as initialised, so its scores are beyond 65504: the known case
is an early attention of a deep pre-norm ViT under AMP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from benchmarks.papers.small_model import HEADS, HIDDEN, Block
from benchmarks.papers.stochastic_rounding import CLASSES, Images
from fp8compile.extras.demo import compiling
from fp8compile.optim import AdamW

DEPTH, ROWS, RATE, SCALE, FACTOR = 3, 16, 1e-3, 2.0**7, 400.0
PLAIN: Mapping[str, Any] = {"linears": "off", "saved": "off", "debug.codegen": "eager"}
ARMS = ("FP32", "off", "auto", "calibrated", "block 0 in FP32")


class PlainBlock(Block):
    """A block with its attention written out, over all tokens: in FP16 the scores are FP16."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        shares = torch.softmax(q @ k.transpose(-1, -2) * (HIDDEN // HEADS) ** -0.5, -1)
        x = x + self.out((shares @ v).transpose(1, 2).reshape(rows, length, HIDDEN))
        x = x + self.down(self.activation(self.up(self.norm_2(x))))
        return x


class ViT(nn.Module):
    """Images [rows, 1, 8, 8] as 16 patches; logits of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, HIDDEN)
        self.positions = nn.Parameter(0.02 * torch.randn(16, HIDDEN))
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).reshape(images.shape[0], 16, 4)
        x = self.patch(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def unstable_vit(seed: int) -> ViT:
    """A fresh ViT whose first scores are far beyond FP16's range."""
    torch.manual_seed(seed)
    model = ViT()
    first = model.blocks[0]
    assert isinstance(first, PlainBlock) and isinstance(first.qkv, nn.Linear)
    with torch.no_grad():
        first.qkv.weight[: 2 * HIDDEN] *= FACTOR
    return model


def options_of(arm: str, model: nn.Module, batch: Tensor) -> dict[str, Any]:
    """The fields of the recipe that an FP16 arm differs in."""
    if arm == "calibrated":
        calibration = fp8compile.calibrate(model, [batch, batch.flip(0)], recipe=dict(PLAIN), loss=_mean_square)
        return {"fp32": calibration}
    return {"fp32": "off", "fp32.keep": ("blocks.0",)} if arm == ARMS[-1] else {"fp32": arm}


def _mean_square(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


def train(arm: str, seed: int, images: Images, steps: int) -> dict[str, Any]:
    """One run at a static loss scale; a step with an inf or NaN among its gradients is skipped."""
    model, began = unstable_vit(seed), time.perf_counter()
    dtype = torch.float32 if arm == "FP32" else torch.float16
    model.to(dtype)
    compiling.forget_compiled()
    run: Any = model
    if arm != "FP32":
        options = {**PLAIN, **options_of(arm, model, images.train[0][:ROWS].to(dtype))}
        run = torch.compile(model, backend=compiling.our_backend(), options=options)
    optimizer = AdamW(model.parameters(), lr=RATE, state_format="fp32", master="none", compiled=False)
    generator, taken = torch.Generator().manual_seed(seed), 0
    for _ in range(steps):
        chosen = torch.randint(len(images.train[1]), (ROWS,), generator=generator)
        loss = F.cross_entropy(run(images.train[0][chosen].to(dtype)).float(), images.train[1][chosen])
        (SCALE * loss).backward()  # type: ignore[no-untyped-call]
        taken += _step_if_finite(model, optimizer)
    islands = fp8compile.report(run).islands if arm != "FP32" else ()
    return {
        "arm": arm,
        "seed": seed,
        "steps_taken": taken,
        "train_loss": float(loss.detach()),
        "islands": len(islands),
        "nodes_widened": sum(island.nodes for island in islands),
        "seconds": time.perf_counter() - began,
    }


def _step_if_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Unscale and step, unless a gradient is not finite; gradients are gone afterwards."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    finite = all(bool(g.isfinite().all()) for g in grads)
    if finite:
        for g in grads:
            g /= SCALE
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return finite
