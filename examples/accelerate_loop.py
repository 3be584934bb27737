"""accelerate: the model is compiled in place, before `accelerator.prepare`.

    pip install fp8compile accelerate transformers && python accelerate_loop.py

A small Llama learns Python's manual, byte by byte. Gradients are accumulated over two batches, and clipped. To make it real,
put your model and your dataset in place of these. For FP16 on a GPU, say mixed_precision="fp16" and set our scaler before
`prepare`: accelerator.scaler = fp8compile.amp.LossScaler()
"""

import pydoc_data.topics

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import fp8compile

GPU = torch.cuda.is_available()
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made


def train(steps=60, layers=2, lr=1e-3):
    torch.manual_seed(0)
    data = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    rows = data[torch.randint(len(data) - 128, (8 * steps, 1)) + torch.arange(128)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16" if GPU else "no")
    model.compile(backend="fp8compile", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
