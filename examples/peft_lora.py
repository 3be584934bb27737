"""LoRA with peft: matmuls of the frozen weights are in FP8, and these weights are encoded once.

    pip install fp8compile peft transformers && python peft_lora.py

A small Llama has learnt Python code, byte by byte. It stays as it is, and adapters learn English: Python's manual.
Matmuls of rank 8 stay in their dtype, since 8 is not a multiple of 16; of rank 16 they are in FP8 too. To make it real, load
a base by `from_pretrained`, and put your text in place of this one.
"""

import inspect
import pydoc_data.topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fp8compile

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made


def learn(model, text, steps, lr):
    data, losses = torch.tensor(list(text.encode())), []
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    for tokens in data[torch.randint(len(data) - 128, (steps, 8, 1)) + torch.arange(128)].to(DEVICE):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(steps=40, base_steps=60, layers=2, rank=8, lr=5e-3):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).to(DEVICE)
    learn(base, inspect.getsource(torch.nn.functional), base_steps, 3e-3)
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    model.compile(backend="fp8compile", options=OPTIONS | {"linears.cache_weights": True})
    return model, learn(model, "\n".join(pydoc_data.topics.topics.values()), steps, lr)


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model), f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", sep="\n")
