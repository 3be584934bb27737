"""A training loop of your own: one argument of torch.compile turns fp8compile on.

    pip install fp8compile transformers && python plain_loop.py

A small Llama learns to write like Python's manual, byte by byte. To make it real, put your model and your batches in place of
these. On a CPU this shows what fp8compile does to a model. It saves time and memory on a GPU only.
"""

import pydoc_data.topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8compile

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made


def text(steps, batch=8, length=128):
    """Windows of Python's manual as bytes, int64 [steps, batch, length]."""
    data = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    return data[torch.randint(len(data) - length, (steps, batch, 1)) + torch.arange(length)]


def train(steps=60, layers=2, lr=1e-3):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).to(DEVICE)
    compiled = torch.compile(model, backend="fp8compile", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for tokens in text(steps).to(DEVICE):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
