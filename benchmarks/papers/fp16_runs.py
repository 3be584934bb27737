"""Trainings in FP16 throughout, with the loss scaled in any of the demo's ways; eager, counted by hooks.

    transformer     bytes, 2 layers x 128, LAMB          for BERT
    inverted        depthwise convolutions, squeeze and excitation, SiLU, on handwritten digits, RMSprop     for EfficientNet

Optimizers are ours, with FP32 moments and no copy of the weights; FP16 weights are rounded stochastically. Rates warm up and
decay, gradients are clipped, and a run diverges, as in the demo (``fp8compile.extras.demo.loss_scales``).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile.amp
from benchmarks.papers.fp16_on_cpu import fp16_in_fp32
from benchmarks.papers.small_model import SmallLM, batches, held_out_text, training_text
from benchmarks.papers.stochastic_rounding import CLASSES, Images
from fp8compile.extras.demo import arms, compiling, loss_scales
from fp8compile.extras.demo.loop import CLIP_NORM, set_rate
from fp8compile.extras.demo.loss_scales import Ends
from fp8compile.extras.demo.model import rate_schedule
from fp8compile.optim import LAMB, RMSprop

Batch = tuple[Tensor, Tensor]  # inputs, targets
HELD_OUT_ROWS, IMAGES = 64, 16


class Inverted(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze and excite, project, add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.expand, self.project = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.squeeze, self.excite = nn.Linear(inner, width), nn.Linear(width, inner)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for channels in (inner, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norms[0](self.expand(x)))
        y = F.silu(self.norms[1](self.depthwise(y)))
        shares = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3))))))
        out: Tensor = x + self.norms[2](self.project(y * shares[:, :, None, None]))
        return out


def inverted_net(width: int = 16, blocks: int = 3) -> nn.Module:
    """Images [rows, 1, 8, 8] to ten logits."""
    stem = nn.Conv2d(1, width, 3, padding=1)
    body = [Inverted(width) for _ in range(blocks)]
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


@dataclass(frozen=True)
class Fp16Task:
    """What is trained: a model from a seed, its optimizer, batches of (seed, steps), the peak rate."""

    about: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int], Iterator[Batch]]
    held_out: Callable[[], Batch]
    rate: float


def transformer_task() -> Fp16Task:
    def split(tokens: Tensor) -> Batch:
        return tokens[:, :-1], tokens[:, 1:]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return LAMB(model, weight_decay=0.01, state_format="fp32", master="none", compiled=False)

    return Fp16Task(
        "transformer of bytes, LAMB",
        lambda: SmallLM(stable=False, layers=2),
        optimizer,
        lambda seed, steps: map(split, batches(training_text(), seed, steps)),
        lambda: split(next(batches(held_out_text(), 0, 1, HELD_OUT_ROWS))),
        rate=1e-2,
    )


def image_task(images: Images) -> Fp16Task:
    def drawn(seed: int, steps: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(len(images.train[1]), (IMAGES,), generator=generator)
            yield images.train[0][chosen], images.train[1][chosen]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return RMSprop(model, alpha=0.9, momentum=0.9, eps=1e-3, state_format="fp32", master="none", compiled=False)

    return Fp16Task(
        "inverted bottlenecks, digits, RMSprop", inverted_net, optimizer, drawn, lambda: images.held_out, 3e-3
    )


@dataclass
class Fp16Run:
    """What a run left; ``end`` is NaN where it stopped."""

    arm: str
    seed: int
    status: str = "done"
    start: float = math.nan
    end: float = math.nan
    skipped: int = 0
    scales: list[float] = field(default_factory=list)

    @property
    def ends(self) -> Ends:
        return Ends(self.start, self.end)


def run(task: Fp16Task, arm: str, seed: int, steps: int) -> Fp16Run:
    """Train one of ``arms.FP16_ARMS``; a run that diverges stops."""
    fp16_in_fp32()
    torch.manual_seed(seed)
    dtype = compiling.dtype_of(arm)
    model = task.model().to(dtype)
    optimizer = task.optimizer(model)
    scaler = loss_scales.scaler_for(arm) if arm in arms.SCALED_ARMS else None
    watched = fp8compile.amp.watch(model) if arm == arms.HISTOGRAM else None
    row = Fp16Run(arm, seed, start=_held_out_loss(model, task, dtype))
    try:
        _train(row, model, optimizer, scaler, task, steps)
        loss_scales.check_parameters(model)
        row.end = _held_out_loss(model, task, dtype)
        loss_scales.check_finite(row.end, "the held-out loss")
    except loss_scales.DivergenceError as why:
        row.status, row.end = f"{loss_scales.DIVERGED} at step {len(row.scales)}: {why}", math.nan
    if watched is not None:
        watched.remove()
    gc.collect()  # the scaler, which the statistics of the next model do not belong to
    return row


def _train(
    row: Fp16Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: loss_scales.GradScalerLike | None,
    task: Fp16Task,
    steps: int,
) -> None:
    rate, taken = rate_schedule(steps), loss_scales.steps_taken(optimizer)
    dtype = next(model.parameters()).dtype
    for step, (inputs, target) in enumerate(task.batches(row.seed, steps)):
        set_rate(optimizer, task.rate * rate(step))
        row.scales.append(scaler.get_scale() if scaler is not None else 1.0)
        loss = _loss(model, inputs, target, dtype)
        loss_scales.check_finite(float(loss.detach()), "the loss")
        loss_scales.apply_gradients(loss, model, optimizer, CLIP_NORM, scaler)
        row.skipped = step + 1 - len(taken)


def _loss(model: nn.Module, inputs: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    logits = model(inputs.to(dtype) if inputs.is_floating_point() else inputs).float()
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


@torch.no_grad()
def _held_out_loss(model: nn.Module, task: Fp16Task, dtype: torch.dtype) -> float:
    return float(_loss(model, *task.held_out(), dtype))
