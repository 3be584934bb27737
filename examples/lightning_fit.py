"""Lightning: a callback compiles the module inside the LightningModule, and our AdamW holds its states in FP8.

    pip install fp8compile lightning transformers && python lightning_fit.py

A small Llama learns Python's manual, byte by byte. To make it real, put your LightningModule and your data in place of these.
"""

import pydoc_data.topics

import lightning.pytorch as pl
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8compile
from fp8compile.integrations.lightning import Fp8CompileCallback

GPU = torch.cuda.is_available()
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made


class Bytes(pl.LightningModule):
    def __init__(self, layers):
        super().__init__()
        sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
        self.losses = []

    def training_step(self, tokens, index):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return fp8compile.optim.AdamW(self.model, lr=1e-3, compiled=GPU)  # not on a CPU: no C++ made


def train(steps=60, layers=2):
    torch.manual_seed(0)
    data = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    batches = data[torch.randint(len(data) - 128, (steps, 8, 1)) + torch.arange(128)]
    module = Bytes(layers)
    once = {"max_epochs": 1, "devices": 1, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(callbacks=[Fp8CompileCallback(OPTIONS)], precision="bf16-mixed" if GPU else None, **once)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module, module.losses


if __name__ == "__main__":
    module, losses = train()
    print(fp8compile.report(module), f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", sep="\n")
