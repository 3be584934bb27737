"""A plain training loop: one argument to torch.compile turns fp8compile on.

python -m examples.plain_loop --twin
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, small_llama, windows


def train(args: Namespace, ours: bool) -> Run:
    """Train a small Llama on text; ``ours``: compiled by fp8compile."""
    model = small_llama(args.layers)
    step_model = torch.compile(model, backend="fp8compile", options=args.options) if ours else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for tokens in windows(args.steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = step_model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, fp8compile.report(model) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=60, lr=1e-3))


if __name__ == "__main__":
    main()
