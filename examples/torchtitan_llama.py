"""torchtitan: its debug Llama, compiled block by block by its own `apply_compile`; the recipe stands in a file.

    python -m examples.torchtitan_llama --twin

torchtitan's Trainer needs a GPU. This is its model, its compilation and its optimizer container in a loop of ours.
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, windows
from fp8compile.integrations.torchtitan import flex_attention, optimizers


def model(layers: int = 2) -> Any:
    """torchtitan's "debugmodel", width 256, with the same parameters at each call; on a CPU with SDPA."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:layers]
    for layer in config.layers:  # FlexAttention has no backward on a CPU
        attention = layer.attention.inner_attention
        cpu = DEVICE == "cpu"
        layer.attention.inner_attention = ScaledDotProductAttention.Config() if cpu else flex_attention(attention)
    torch.manual_seed(0)
    built = config.build().to(DEVICE)
    built.init_weights(buffer_device=None)
    return built


def train(args: Namespace, ours: bool) -> Run:
    """Train on text; ``ours``: compiled by fp8compile. The twin has the same optimizer."""
    llama = model()
    if ours:
        single = mock.Mock(tp_enabled=False)  # torchtitan's ParallelDims of one process
        apply_compile(llama, compile_config=CompileConfig(enable=True, backend="fp8compile"), parallel_dims=single)
    optimizer = optimizers(default_adamw(lr=args.lr), compiled=args.codegen != "eager").build(model_parts=[llama])
    losses = []
    for tokens in windows(args.steps):
        places = torch.arange(tokens.shape[1] - 1, device=DEVICE).expand(len(tokens), -1)
        masks = None if DEVICE == "cpu" else llama.get_attention_masks(positions=places)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = llama(tokens[:, :-1], attention_masks=masks, positions=places)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, fp8compile.report(llama) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    args = arguments(argv, __doc__ or "", steps=30, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "recipe.json").write_text(json.dumps(args.options))
        with mock.patch.dict(os.environ, FP8COMPILE_RECIPE=str(path)):  # in a shell: FP8COMPILE_RECIPE=recipe.json
            return both(train, args)


if __name__ == "__main__":
    main()
