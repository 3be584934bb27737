"""One training of a small pipeline whose links are coded, in one process: both ends of each link, as two ranks have them.

The model of bytes of ``benchmarks.papers`` is cut between its blocks. Where a rank would send, ``link`` encodes by one end
and goes on with what the other decodes; backward it does the same with the gradient. A test holds this to two ranks, bit for
bit (``tests/extras/links/test_pipelining.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.small_model import LENGTH, SmallLM, fit, held_out_loss, loss_of, training_text
from fp8compile.extras.links.link_ends import ChangesEnd, DirectEnd
from fp8compile.numerics.metrics import decibels, power
from fp8compile.numerics.wire_codes import WireCode

LAYERS, ROWS = 4, 8


@dataclass(frozen=True)
class Arm:
    """How links are coded.

    Attributes:
        bits, backward_bits: of activations and gradients; None: plain links.
        changes: of samples, or each activation for itself.
        dropout: before each link.
        first: bits of first visits.
    """

    bits: int | None = None
    backward_bits: int | None = None
    changes: bool = False
    dropout: float = 0.0
    first: int = 16

    def end(self) -> Any:
        """One end of a link for activations."""
        code = WireCode(self.bits)
        return ChangesEnd(code, WireCode(self.first), check=False) if self.changes else DirectEnd(code)


@dataclass
class Seen:
    """What an epoch saw on its links: powers of activations, of errors of what was received, and of changes; bytes sent."""

    signal: float = 0.0
    error: float = 0.0
    sent: int = 0
    plain: int = 0

    @property
    def db(self) -> float | None:
        """SQNR of what was received; None where nothing was lost."""
        found = decibels(self.signal, self.error)
        return found if math.isfinite(found) else None


@dataclass
class Link:
    """Both ends."""

    arm: Arm
    seen: Seen = field(default_factory=Seen)

    def __post_init__(self) -> None:
        self.sender, self.receiver = self.arm.end(), self.arm.end()
        self.gradients = DirectEnd(WireCode(self.arm.backward_bits))

    def __call__(self, x: Tensor, ids: Sequence[int] | None) -> Tensor:
        """What the next stage computes with. ``ids`` None: the exact activation, for an evaluation."""
        if ids is None:
            return x
        x = F.dropout(x, self.arm.dropout)
        return x if self.arm.bits is None else _Sent.apply(x, self, ids)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        like = torch.empty_like(x)
        wire = self.sender.encode(x, ids)
        received: Tensor = self.receiver.decode(wire, like, ids)
        self.seen.signal += power(x)
        self.seen.error += power(x - received)
        self.seen.sent += wire.nbytes
        self.seen.plain += x.nbytes
        return received


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, ids: Sequence[int]) -> Tensor:
        ctx.link = link
        return link.forward(x, ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), end = grads, ctx.link.gradients
        return end.decode(end.encode(grad, None), grad, None), None, None


class Pipeline(nn.Module):
    """``SmallLM`` with a link after each block but the last."""

    def __init__(self, model: SmallLM, arm: Arm) -> None:
        super().__init__()
        self.model = model
        self.links = [Link(arm) for _ in range(len(model.blocks) - 1)]
        self.ids: Sequence[int] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.tokens(tokens) + self.model.positions
        for block, link in zip(self.model.blocks, [*self.links, None], strict=True):
            x = block(x)
            x = x if link is None else link(x, self.ids)
        logits: Tensor = self.model.head(self.model.norm(x))
        return logits

    def taken(self) -> Seen:
        """What all links saw since the last call."""
        total = Seen()
        for link in self.links:
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(link.seen, name))
            link.seen = Seen()
        return total


@functools.cache
def pretrained(seed: int, steps: int) -> dict[str, Tensor]:
    """The weights that fine-tuning begins with; after 0 steps those of a new model."""
    model = new_model(seed)
    fit(model, seed, steps)
    return {name: value.clone() for name, value in model.state_dict().items()}


def new_model(seed: int) -> SmallLM:
    torch.manual_seed(seed)
    return SmallLM(stable=False, layers=LAYERS)


def samples(seed: int, count: int) -> Tensor:
    """int64 ``[count, LENGTH + 1]``: windows of one stretch of the text, so that there is something to learn from them."""
    text = training_text()
    generator = torch.Generator().manual_seed(1000 + seed)
    start = int(torch.randint(len(text) - count * LENGTH - 1, (1,), generator=generator))
    places = start + LENGTH * torch.arange(count)
    return text[places[:, None] + torch.arange(LENGTH + 1)].long()


def steps_of(seed: int, epoch: int, count: int) -> Iterator[list[int]]:
    """The samples of each step; every epoch has its own order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(100 * seed + epoch)).tolist()
    return (order[i : i + ROWS] for i in range(0, count, ROWS))


def run(
    arm: Arm, seed: int, weights: dict[str, Tensor], count: int, epochs: int, rate: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """One training on ``count`` samples; its losses, and by epoch the SQNR of what links received."""
    model = new_model(seed)
    model.load_state_dict(weights)
    pipeline, data = Pipeline(model, arm), samples(seed, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    losses, received, traffic = [], [], Seen()
    for epoch in range(epochs):
        found = []
        for step, ids in enumerate(steps_of(seed, epoch, count)):
            done = (epoch + step * ROWS / count) / epochs
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - 0.9 * done)
            pipeline.ids = ids
            loss = loss_of(pipeline, data[ids])
            found.append(float(loss.detach()))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        traffic = pipeline.taken()
        losses.append(sum(found) / len(found))
        received.append(traffic.db)
    pipeline.ids = None
    with torch.no_grad():
        fitted = sum(float(loss_of(pipeline, part)) for part in data.split(64)) / math.ceil(count / 64)
    row = {
        "losses": losses,
        "fitted": fitted,
        "held_out": held_out_loss(pipeline),
        "received_db": received,
        "bits_sent": 32 * traffic.sent / traffic.plain if traffic.plain else 32.0,
    }
    tell(f"{arm} seed {seed}: fitted {fitted:.4f} held out {row['held_out']:.4f} dB {received}")
    return row
