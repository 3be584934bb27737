"""LoRA with peft: the base model is frozen, adapters of rank ``--rank`` learn another kind of text.

    python -m examples.peft_lora --twin

The base learns Python source for ``--base`` steps, and the adapters learn English: Python's own manual, the one text in its
library that is prose. Matmuls of the frozen weights are in FP8, and these are encoded once (``linears.cache_weights``).
Matmuls of rank 8 are not, since 8 is not a multiple of 16.
At twice this learning rate the base's weights need only be off by 1/32 at random for the twin itself to end 0.2 % apart.
"""

from __future__ import annotations

import pydoc_data.topics
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, small_llama, windows
from fp8compile.demo.data import train_batches

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def manual(steps: int) -> list[Tensor]:
    """Batches of English: int64 [8, 128]."""
    text = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    return [tokens.to(DEVICE) for tokens in train_batches(text, 8, 128, 0, steps)]


def learn(model: Any, batches: Iterable[Tensor], lr: float) -> list[float]:
    """A step on each batch; the losses."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    losses = []
    for tokens in batches:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(args: Namespace, ours: bool) -> Run:
    """Train adapters on a frozen base; ``ours``: compiled by fp8compile."""
    base = small_llama(args.layers)
    learn(base, windows(args.base), 3e-3)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=LINEARS))
    if ours:
        model.compile(backend="fp8compile", options=args.options | {"linears.cache_weights": True})
    losses = learn(model, manual(args.steps), args.lr)
    return Run(losses, fp8compile.report(model) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=40, base=60, rank=8, lr=5e-3))


if __name__ == "__main__":
    main()
