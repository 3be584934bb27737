"""A tiny vision-language model: a patch encoder puts prefix tokens before a small Llama, which spells what it sees.

    python -m examples.tiny_vlm --twin

The images are scikit-learn's handwritten digits. A caption is the digit's name in bytes: "seven", padded with spaces.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both, small_llama
from examples.timm_finetune import define_operators_of_torchvision

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH, WIDTH, IGNORED = 8, 128, -100
Batch = tuple[Tensor, Tensor]


class TinyVLM(nn.Module):
    """Image and caption in, the caption's loss out.

    The image, [batch, 8, 8] in -1 ... 1, is cut into 16 patches of 2 x 2. Each becomes a token of the Llama's width, and the
    caption, int64 [batch, 8], follows them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.language = small_llama()
        self.patches = nn.Linear(4, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(16, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.vision = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)
        prefix = self.project(self.vision(self.patches(patches) + self.places))
        inputs = torch.cat([prefix, self.language.get_input_embeddings()(captions)], 1)
        labels = torch.cat([captions.new_full(prefix.shape[:2], IGNORED), captions], 1)
        loss: Tensor = self.language(inputs_embeds=inputs, labels=labels).loss
        return loss


def pairs(steps: int, batch: int = 32) -> list[Batch]:
    """``steps`` batches of digits and captions."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).float() / 8 - 1
    captions = torch.stack([torch.tensor(list(NAMES[i].ljust(LENGTH).encode())) for i in found.target])
    chosen = torch.Generator().manual_seed(0)
    rows = [torch.randint(len(images), (batch,), generator=chosen) for _ in range(steps)]
    return [(images[r].to(DEVICE), captions[r].to(DEVICE)) for r in rows]


def train(args: Namespace, ours: bool) -> Run:
    """Train on captioned digits; ``ours``: compiled by fp8compile."""
    define_operators_of_torchvision()  # transformers imports torchvision where there is one
    torch.manual_seed(0)
    model = TinyVLM().to(DEVICE)
    step_model = torch.compile(model, backend="fp8compile", options=args.options) if ours else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for images, captions in pairs(args.steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = step_model(images, captions)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, fp8compile.report(step_model) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=40, lr=1e-3))


if __name__ == "__main__":
    main()
