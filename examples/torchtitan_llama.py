"""torchtitan: its debug Llama, compiled block by block by its own `apply_compile`. The recipe stands in a file.

    pip install fp8compile torchtitan && python torchtitan_llama.py

torchtitan's Trainer needs a GPU. This is a loop of your own, on a CPU, with its model, its compilation and its optimizers. To
make it real, use torchtitan's command line on a GPU: docs/guide/trainers-more.md has the flags.
"""

import os
import pydoc_data.topics
from pathlib import Path
from types import SimpleNamespace

import torch
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import fp8compile
from fp8compile.integrations.torchtitan import optimizers


def train(steps=30, lr=1e-3):
    torch.manual_seed(0)
    data = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    (model := config.build()).init_weights(buffer_device=None)
    Path("recipe.json").write_text('{"linears.emulate": true, "debug.codegen": "eager"}')  # for a CPU
    os.environ["FP8COMPILE_RECIPE"] = "recipe.json"  # in a shell: FP8COMPILE_RECIPE=recipe.json torchrun ...
    alone = SimpleNamespace(tp_enabled=False)  # in place of torchtitan's ParallelDims
    apply_compile(model, compile_config=CompileConfig(enable=True, backend="fp8compile"), parallel_dims=alone)
    optimizer, losses = optimizers(default_adamw(lr=lr), compiled=False).build(model_parts=[model]), []
    for tokens in data[torch.randint(len(data) - 128, (steps, 8, 1)) + torch.arange(128)]:
        logits = model(tokens[:, :-1], positions=torch.arange(127).expand(8, -1))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model), f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", sep="\n")
