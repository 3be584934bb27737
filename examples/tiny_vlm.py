"""A tiny vision-language model: a patch encoder puts prefix tokens before a small Llama, which spells what it sees.

    pip install fp8compile accelerate scikit-learn transformers && python tiny_vlm.py

Scikit-learn's digits, in patches of 2 x 2, are named. To make it real, load vision and language by `from_pretrained`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8compile
from fp8compile.integrations.transformers import Fp8CompileCallback

GPU = torch.cuda.is_available()
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class TinyVLM(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
        self.language = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
        self.patches, self.places = nn.Linear(4, 128), nn.Parameter(0.1 * torch.randn(16, 128))
        self.vision = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True), 1)
        self.project = nn.Linear(128, 128)

    def forward(self, images, captions):
        prefix = self.project(self.vision(self.patches(nn.functional.unfold(images, 2, stride=2).mT) + self.places))
        inputs = torch.cat([prefix, self.language.get_input_embeddings()(captions)], 1)
        return self.language(inputs_embeds=inputs, labels=nn.functional.pad(captions, (16, 0), value=-100))


def train(steps=40, lr=1e-3):
    torch.manual_seed(0)
    digits, captions = load_digits(), [torch.tensor(list(name.ljust(8).encode())) for name in NAMES]
    images = torch.tensor(digits.images)[:, None].float() / 8 - 1
    rows = [{"images": images[i], "captions": captions[name]} for i, name in enumerate(digits.target)]
    quiet = {"bf16": GPU, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings = TrainingArguments("output", max_steps=steps, learning_rate=lr, per_device_train_batch_size=32, **quiet)
    trainer = Trainer(TinyVLM(), settings, train_dataset=rows, callbacks=[Fp8CompileCallback(OPTIONS)])
    trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model), f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", sep="\n")
