"""One run of the 8-bit paper's ablation: a small transformer (``small_model``), AdamW with states of any kind.

    states       fp32
                 dynamic, linear                       dynamic_tree, int8
                 ..., v to 0                           as in the 8-bit paper: a small v is rounded to 0; ours never is
    blocks       of 128, or one per tensor

A run *diverges* if a loss exceeds EXPLODED or is not finite (it is stopped there), or if at the end it is no better than
knowing how frequent each byte is: the mean loss of the last tenth above the entropy of single bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.small_model import SmallLM, batches, loss_of
from fp8compile.numerics.formats import INT8
from fp8compile.numerics.scaling import inv_scale_of, quantize
from fp8compile.numerics.states.dynamic_tree import DynamicTree, magnitude_of
from fp8compile.numerics.states.interface import GROUP, StateCodec, unit_and_amax
from fp8compile.numerics.states.plain import UINT8, LinearCodes
from fp8compile.numerics.states.registry import state_codec
from fp8compile.optim import AdamW
from fp8compile.optim.placement import Placement

EXPLODED = 100.0  # nats per byte; 5.5 is chance
TO_ZERO = ", v to 0"
FORMATS = {"fp32": "fp32", "dynamic": "dynamic_tree", "linear": "int8"}


@dataclass(frozen=True)
class Setting:
    """What varies from run to run, the state format apart."""

    lr: float
    eps: float = 1e-7
    beta1: float = 0.90
    beta2: float = 0.99
    stable: bool = False
    seed: int = 0


@dataclass(frozen=True)
class LinearToZero(LinearCodes):
    """8-bit integers, rounded to nearest whatever becomes of small values."""

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        inv_scale = inv_scale_of(x_NG.abs().amax(-1, keepdim=True), self.code)
        codes = (x_NG * inv_scale.reciprocal()).round() if self.code == UINT8 else x_NG
        return (codes.to(torch.uint8) if self.code == UINT8 else quantize(x_NG, inv_scale, self.code)), inv_scale


@dataclass(frozen=True)
class TreeToZero(DynamicTree):
    """The dynamic tree, rounded to nearest whatever becomes of small values."""

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        codes, amax = super().encode_groups(x_NG)
        if self.signed:
            return codes, amax
        unit, _ = unit_and_amax(x_NG)
        return magnitude_of(unit, 8).to(torch.uint8), amax


@dataclass(frozen=True)
class AblationPlacement(Placement):
    """Codecs that the optimizers do not offer: one scale per tensor, a v that may become 0; all rounded to nearest."""

    tensorwise: bool = False
    to_zero: bool = False

    def codec(self, signed: bool, group_size: int | None = GROUP) -> StateCodec:
        size = None if self.tensorwise else group_size
        if self.to_zero:
            return LinearToZero(signed, size, INT8) if self.formats[0] == "int8" else TreeToZero(signed, size)
        return state_codec(self.formats[0 if signed else 1], signed=signed, group_size=size, rounding="nearest")


class AblationAdamW(AdamW):
    """AdamW whose encoded states are ``states``, in blocks or with one scale per tensor."""

    def __init__(self, model: nn.Module, states: str, tensorwise: bool, **options: Any) -> None:
        self.states, self.tensorwise = states, tensorwise
        super().__init__(model.parameters(), state_format=FORMATS[states.removesuffix(TO_ZERO)], **options)

    def placement(self, p: Tensor, group: Mapping[str, Any]) -> Placement:
        placed = super().placement(p, group)
        if set(placed.formats) == {"fp32"}:
            return placed
        return AblationPlacement(placed.formats, placed.reason, self.tensorwise, self.states.endswith(TO_ZERO))


def train(setting: Setting, states: str, tensorwise: bool, steps: int, compiled: bool, text: Tensor) -> list[float]:
    """The losses of a run on ``text``, up to one that has exploded. A tenth of the steps warm up; nothing is clipped."""
    torch.manual_seed(setting.seed)
    model = SmallLM(setting.stable)
    settings = {"lr": setting.lr, "betas": (setting.beta1, setting.beta2), "eps": setting.eps, "weight_decay": 0.0}
    optimizer = AblationAdamW(model, states, tensorwise, compiled=compiled, **settings)
    losses: list[float] = []
    for step, tokens in enumerate(batches(text, setting.seed, steps)):
        optimizer.param_groups[0]["lr"] = setting.lr * min(1.0, (step + 1) / (steps / 10))
        loss = loss_of(model, tokens)
        losses.append(float(loss.detach()))
        if not losses[-1] <= EXPLODED:
            break
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def final_loss(losses: list[float]) -> float:
    """The mean of the last tenth; NaN or inf where a loss was."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def diverged(losses: list[float], entropy: float) -> bool:
    """By the rule at the head of this file; ``entropy``: ``byte_entropy`` of the text."""
    return not (losses[-1] <= EXPLODED and final_loss(losses) <= entropy)
