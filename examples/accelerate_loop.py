"""A loop with accelerate: the model is compiled in place before ``accelerator.prepare``.

    python -m examples.accelerate_loop --twin

Gradients are accumulated over two micro-batches and clipped. With ``mixed_precision="fp16"`` on a GPU, one more line before
``prepare``: ``accelerator.scaler = fp8compile.amp.LossScaler()``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, small_llama, windows


def train(args: Namespace, ours: bool) -> Run:
    """Train a small Llama on text; ``ours``: compiled by fp8compile."""
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16" if DEVICE == "cuda" else "no")
    model = small_llama(args.layers)
    if ours:
        model.compile(backend="fp8compile", options=args.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rows = torch.cat([batch.cpu() for batch in windows(args.steps)])
    loader: DataLoader[Tensor] = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, micro = [], []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        micro.append(loss.item())
        if accelerator.sync_gradients:
            losses.append(sum(micro) / len(micro))
            micro.clear()
    return Run(losses, fp8compile.report(accelerator.unwrap_model(model)) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=60, lr=1e-3))


if __name__ == "__main__":
    main()
