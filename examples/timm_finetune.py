"""timm: a small ConvNeXt, or a vision transformer, learns scikit-learn's handwritten digits.

    python -m examples.timm_finetune --twin

`pretrained=True` in `create_model` makes a fine-tune of it; the line that turns fp8compile on is the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both

SIZE, PATCH = 32, 8


def create(name: str, seed: int = 0) -> Any:
    """A ConvNeXt or ViT of timm for 10 classes and grey images of 32 x 32, with the same parameters at each call."""
    define_operators_of_torchvision()
    import timm

    torch.manual_seed(seed)
    small: dict[str, Any] = {"img_size": SIZE, "patch_size": PATCH, "depth": 2}
    if "convnext" in name:
        small = {"depths": (1, 1, 2, 1), "dims": (48, 96, 192, 384), "ls_init_value": 1.0}
    return timm.create_model(name, pretrained=False, num_classes=10, in_chans=1, **small).to(DEVICE)


def define_operators_of_torchvision() -> None:
    """A torchvision without its own binary, or for another torch, cannot be imported unless these exist."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def digits(steps: int, batch: int = 32) -> list[tuple[Tensor, Tensor]]:
    """``steps`` batches of images, float32 [batch, 1, 32, 32] in -1 ... 1, and their labels, int64 [batch]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    images = torch.nn.functional.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
    labels, chosen = torch.from_numpy(found.target).long(), torch.Generator().manual_seed(0)
    rows = [torch.randint(len(images), (batch,), generator=chosen) for _ in range(steps)]
    return [(images[r].to(DEVICE), labels[r].to(DEVICE)) for r in rows]


def train(args: Namespace, ours: bool) -> Run:
    """Train on digits; ``ours``: compiled by fp8compile."""
    model = create(args.model, args.seed)
    step_model = torch.compile(model, backend="fp8compile", options=args.options) if ours else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for images, labels in digits(args.steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = torch.nn.functional.cross_entropy(step_model(images), labels, label_smoothing=0.1)  # as timm's own
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, fp8compile.report(step_model) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=40, lr=1e-3, model="convnext_tiny", seed=0))


if __name__ == "__main__":
    main()
