"""Lightning: a callback compiles the LightningModule's inner module in place; our AdamW holds its states in FP8.

python -m examples.lightning_fit --twin
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, small_llama, windows
from fp8compile.integrations.lightning import Fp8CompileCallback


class Bytes(pl.LightningModule):
    """A small Llama that predicts the next byte."""

    def __init__(self, rate: float, compiled: bool = True) -> None:
        super().__init__()
        self.rate, self.compiled = rate, compiled
        self.model = small_llama()
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fp8compile.optim.AdamW(self.model, lr=self.rate, compiled=self.compiled)


def trainer(callbacks: list[Any], **changes: Any) -> pl.Trainer:
    """A Trainer that is quiet, keeps no files and runs in one process."""
    usual: dict[str, Any] = {
        "accelerator": "gpu" if DEVICE == "cuda" else "cpu",
        "precision": "bf16-mixed" if DEVICE == "cuda" else "32-true",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=callbacks, devices=1, **{**usual, **changes})


def train(args: Namespace, ours: bool) -> Run:
    """Train on text; ``ours``: compiled by fp8compile. The twin has the same optimizer."""
    module = Bytes(args.lr, compiled=args.codegen != "eager")
    callback = Fp8CompileCallback(args.options)
    batches = DataLoader(windows(args.steps), batch_size=None)  # type: ignore[arg-type]
    trainer([callback] if ours else []).fit(module, batches)
    return Run(module.losses, callback.report)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=60, lr=1e-3))


if __name__ == "__main__":
    main()
