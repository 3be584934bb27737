"""Hugging Face's Trainer: a callback compiles the model in place, our AdamW holds its states in FP8.

    python -m examples.hf_trainer --twin

Batches are accumulated over two micro-batches, and layers are checkpointed: both are Trainer's own options.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, small_llama, windows
from fp8compile.integrations.transformers import Fp8CompileCallback


def dataset(steps: int) -> list[dict[str, torch.Tensor]]:
    """One window of text for each row of each step."""
    return [{"input_ids": row, "labels": row} for batch in windows(steps) for row in batch.cpu()]


def settings(folder: str, args: Namespace, **changes: Any) -> TrainingArguments:
    """TrainingArguments for windows of text: eight rows a step, in two micro-batches."""
    usual: dict[str, Any] = {
        "max_steps": args.steps,
        "learning_rate": args.lr,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "bf16": DEVICE == "cuda",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(folder, **{**usual, **changes})


def train(args: Namespace, ours: bool) -> Run:
    """Train a small Llama on text; ``ours``: compiled by fp8compile, with its optimizer."""
    model = small_llama(args.layers)
    if ours:
        optimizer: torch.optim.Optimizer = fp8compile.optim.AdamW(model, lr=args.lr, compiled=args.codegen != "eager")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    callback = Fp8CompileCallback(args.options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            settings(folder, args),
            train_dataset=dataset(args.steps),
            optimizers=(optimizer, None),
            callbacks=[callback] if ours else [],
        )
        trainer.train()
    return Run([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], callback.report)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=40, lr=1e-3))


if __name__ == "__main__":
    main()
