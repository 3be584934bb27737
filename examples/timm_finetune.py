"""timm: a small ConvNeXt learns to read scikit-learn's handwritten digits.

    pip install fp8compile timm scikit-learn && python timm_finetune.py

To make it a fine-tune, say pretrained=True and leave out depths, dims and ls_init_value: these make the model small. Then put
your images in place of the digits. Convolutions stay in their dtype. What they save for backward is stored as codes.
"""

import timm
import torch
from sklearn.datasets import load_digits

import fp8compile

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPTIONS = {} if GPU else {"linears.emulate": True, "debug.codegen": "eager"}  # on a CPU: FP8 emulated, no C++ made


def digits(steps, batch=32):
    """Batches of images, float32 [batch, 1, 32, 32] in -1 ... 1, with their labels, int64 [batch]."""
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    images = torch.nn.functional.interpolate(images, size=(32, 32), mode="bilinear").to(DEVICE)
    labels = torch.from_numpy(found.target).long().to(DEVICE)
    return [(images[rows], labels[rows]) for rows in torch.randint(len(images), (steps, batch))]


def train(steps=40, lr=1e-3, seed=0):
    torch.manual_seed(seed)
    small = {"depths": (1, 1, 2, 1), "dims": (48, 96, 192, 384), "ls_init_value": 1.0}
    model = timm.create_model("convnext_tiny", pretrained=False, num_classes=10, in_chans=1, **small).to(DEVICE)
    compiled = torch.compile(model, backend="fp8compile", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for images, labels in digits(steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            loss = torch.nn.functional.cross_entropy(compiled(images), labels, label_smoothing=0.1)  # as timm's own
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    model, losses = train()
    print(fp8compile.report(model))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
