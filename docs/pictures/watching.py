"""The pictures of "Watching a run": 300 steps in FP16 of which step 214 ends in a NaN, and the page in a browser.

    python docs/pictures/watching.py RUN            trains into the folder RUN, and writes docs/pictures/watching-*.png
    python docs/pictures/watching.py RUN --again    draws the run that is there

Needs Chromium and Playwright, as the tests of the pages do. In step 214 alone the weights that make q, k and v in block 2
are 600 times too large, so that q k overflows in FP16. The other overflows are those of a dynamic loss scale, which tries
again and again how large it may be.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # a script's own folder is all that is there

import fp8compile  # noqa: E402
from fp8compile.extras.watching.folder import runs_of  # noqa: E402
from fp8compile.extras.watching.page import snapshot  # noqa: E402
from tests.support.browser import browser, opened  # noqa: E402

STEPS, SPOILT, WORDS, WIDTH = 300, 214, 64, 64


class Attention(nn.Module):
    """One head, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 8
        out: Tensor = self.out(scores.softmax(-1) @ v)
        return out


class Block(nn.Module):
    """Attention and two linears, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.layer_norm(x, (WIDTH,)))
        out: Tensor = x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))
        return out


class Model(nn.Module):
    """Words in, logits of the next word out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batch(step: int) -> Tensor:
    """Int64 ``[8, 33]``: counting by 1, 2 or 3 from anywhere."""
    generator = torch.Generator().manual_seed(step)
    by, start = torch.randint(1, 4, (8, 1), generator=generator), torch.randint(WORDS, (8, 1), generator=generator)
    return (start + by * torch.arange(33)) % WORDS


def train(folder: Path) -> None:
    torch.manual_seed(0)
    model = Model().half()
    run = torch.compile(model, backend="fp8compile", options={"fp32.observe": True, "debug.codegen": "eager"})
    optimizer = fp8compile.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = fp8compile.amp.LossScaler("dynamic", init_scale=2.0**23, growth_interval=20)
    qkv: Tensor = model.get_parameter("blocks.2.attention.qkv.weight")
    with fp8compile.extras.watching.watch(run, scaler, optimizer, folder, sqnr_every=20) as watcher:  # type: ignore[arg-type]
        for step in range(1, STEPS + 1):
            words, healthy = batch(step), qkv.detach().clone()
            qkv.data.mul_(600 if step == SPOILT else 1)
            loss = F.cross_entropy(run(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == SPOILT:  # that step was skipped
                qkv.data.copy_(healthy)
            watcher.log(loss=loss, tokens=words[:, 1:].numel())


def draw(folder: Path) -> None:
    """The page as it opens, and behind a click on the first entry of the list."""
    page = folder / "run.html"
    page.write_text(snapshot("demo", runs_of(folder)))
    size = {"width": 1280, "height": 860}
    with browser() as running, opened(running, page.as_uri(), viewport=size, color_scheme="light") as seen:
        seen.page.wait_for_selector(".u-over")
        seen.page.screenshot(path=ROOT / "docs/pictures/watching-run.png")
        seen.page.click(f"#overflows [data-step='{SPOILT}']")
        seen.page.screenshot(path=ROOT / "docs/pictures/watching-step.png")
        assert (seen.errors, seen.requests) == ([], [])


if __name__ == "__main__":
    if "--again" not in sys.argv:
        train(Path(sys.argv[1]))
    draw(Path(sys.argv[1]))
