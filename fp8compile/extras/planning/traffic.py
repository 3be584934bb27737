"""Bytes that one GPU sends in a step. Every figure is an estimate, the same for BF16 and for fp8compile.

    all-gather or reduce-scatter of N bytes among n GPUs: each sends (n - 1) / n N
        Ring algorithms; Rajbhandari et al., ZeRO (arXiv:1910.02054), section 7.
    FSDP = weights gathered for the forward and again for the backward, gradients scattered: 3 N for each micro-batch
        ZeRO stage 3, section 7.2.2. With a pipeline weights are gathered once in a step and gradients scattered once: 2 N.
    TP   = for each layer and micro-batch: forward 2 all-gathers and 2 reduce-scatters of the hidden states, backward the
           same and 2 all-gathers of what the forward did not save whole
        Korthikanti et al. (arXiv:2205.05198), section 4.2.2. The embedding adds 1 + 1 of them, the head 1 + 2.
    PP   = hidden states of a micro-batch to the next stage, their gradient to the stage before
        Narayanan et al., Megatron-LM (arXiv:2104.04473), section 4.1: split over tp, each part is sent once.

Weights, gradients and hidden states travel in BF16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8compile.extras.planning.bytes import BF16, Stage, stages
from fp8compile.extras.planning.layout import Layout, StepShape
from fp8compile.extras.planning.models import Shape

COLLECTIVES_OF_A_LAYER, OF_THE_EMBEDDING, OF_THE_HEAD = 10, 2, 3


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one GPU sends in a step, by what asks for them."""

    fsdp: int
    tp: int
    pp: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.fsdp + self.tp + self.pp


def traffic(shape: Shape, layout: Layout, step: StepShape) -> SentBytes:
    """What the GPU that sends most sends."""
    return max((_of_stage(shape, stage, layout, step) for stage in stages(shape, layout.pp)), key=_total)


def _total(sent: SentBytes) -> int:
    return sent.total


def _of_stage(shape: Shape, stage: Stage, layout: Layout, step: StepShape) -> SentBytes:
    size, count = step.split(layout)
    first, last = stage.index == 0, stage.index == layout.pp - 1
    weights = stage.parameters / layout.tp * BF16
    times = 2 if layout.pp > 1 else 3 * count
    hidden = size * step.seq * shape.hidden * BF16
    collectives = COLLECTIVES_OF_A_LAYER * stage.layers + OF_THE_EMBEDDING * first + OF_THE_HEAD * last
    return SentBytes(
        math.ceil(_share(layout.fsdp) * weights * times),
        math.ceil(_share(layout.tp) * hidden * collectives * count),
        math.ceil(hidden / layout.tp * count * ((not first) + (not last))),
    )


def _share(gpus: int) -> float:
    return (gpus - 1) / gpus
