"""Hugging Face's Trainer: a callback compiles the model, and our AdamW holds its states in FP8.

    pip install fp8compile accelerate transformers && python hf_trainer.py

A small Llama learns Python's manual, byte by byte. Gradients are accumulated and layers are checkpointed, by Trainer's own
options. To make it real, put your model and your dataset in place of these.
"""

import pydoc_data.topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8compile
from fp8compile.integrations.transformers import Fp8CompileCallback

GPU = torch.cuda.is_available()
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made


def train(steps=40, layers=2, lr=1e-3):
    torch.manual_seed(0)
    data = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    rows = data[torch.randint(len(data) - 128, (8 * steps, 1)) + torch.arange(128)]
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    trainer = Trainer(
        model,
        TrainingArguments("output", max_steps=steps, learning_rate=lr, bf16=GPU, **batches, **quiet),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(fp8compile.optim.AdamW(model, lr=lr, compiled=GPU), None),  # not on a CPU: no C++ made
        callbacks=[Fp8CompileCallback(OPTIONS)],
    )
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
