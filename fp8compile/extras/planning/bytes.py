"""Memory of one GPU in a training step, part by part. Every figure is an estimate.

    weights, gradients, states = parameters of the stage / tp / fsdp, times bytes per parameter
        Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5: stage 3 divides all three by the number of replicas.
    gathered = without a pipeline: weights of two neighbouring units (the running one, the next), gradients of one
               with it: the stage's weights and gradients, which stay whole until the last micro-batch of the step
        FSDP2 prefetches one unit; torchtitan reshards after the forward unless there is a pipeline.
    activations = bytes saved per token and layer * tokens / tp * layers * micro-batches in flight
        Per layer: fp8compile/extras/planning/measured.py. Over tp: Korthikanti et al., Reducing Activation Recomputation
        (arXiv:2205.05198), section 4.2, tensor with sequence parallelism. In flight: Narayanan et al., Megatron-LM
        (arXiv:2104.04473), section 2.2.1: under 1F1B stage s of pp holds min(pp - s, micro-batches).
    logits = tokens * vocabulary / tp * (2 + 4)       BF16, and FP32 in the loss; on the last stage, one micro-batch
    workspace = most that one layer needs at one time, see ``SavedElements.workspace``; over tp

A GPU's need is that of the stage that needs most. Not counted: the CUDA context and libraries, buffers of NCCL, the
allocator's fragmentation, FP8 codes of a matmul's operands while it runs, what an optimizer needs while it steps.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from fp8compile.extras.planning.layout import Layout, StepShape, stage_layers
from fp8compile.extras.planning.measured import OURS, PLAIN, STATE, SavedElements
from fp8compile.extras.planning.models import Shape

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Way:
    """A way to train: bytes per parameter, and what a layer saves.

    Attributes:
        name: for tables.
        weights: bytes held per parameter for the weight itself.
        gradients: bytes per parameter.
        states: bytes per parameter of a matrix for all that the optimizer keeps.
        exact_states: the same for embeddings and norms.
        saved: what a layer saves for backward.
    """

    name: str
    weights: float
    gradients: float
    states: float
    exact_states: float
    saved: SavedElements


# FP32 copies of the weights and two FP32 moments, however they are spread between optimizer and FSDP: 16 bytes in all.
BASELINE = Way("BF16", BF16, BF16, 3 * FP32, 3 * FP32, PLAIN)
# fp8compile.optim.AdamW(model, master="split"): one byte beside the BF16 weight; embeddings and norms keep FP32 moments.
FP8COMPILE = Way("ours", BF16, BF16, 1 + 2 * STATE, 1 + 2 * FP32, OURS)


@dataclass(frozen=True)
class Parts:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    states: int
    gathered: int
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum: what the step needs at most at one time."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Stage:
    """Parameters of one stage, before they are split or sharded."""

    index: int
    layers: int
    matrices: int
    exact: int
    largest: tuple[int, int]  # of its units that are gathered at once: two neighbours, and the larger of all

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.matrices + self.exact


def stages(shape: Shape, pp: int) -> tuple[Stage, ...]:
    """The stages of a pipeline: the embedding is in the first, the head and the last norm in the last."""
    layer = shape.layer_matrices + shape.layer_norms
    found = []
    for index, layers in enumerate(stage_layers(shape.layers, pp)):
        first, last = index == 0, index == pp - 1
        matrices = layers * shape.layer_matrices + (shape.table if last else 0)
        exact = layers * shape.layer_norms + (shape.table if first else 0) + (shape.hidden if last else 0)
        end = shape.table if first or last else 0
        pair = layer + max(end, layer if layers > 1 else 0)
        found.append(Stage(index, layers, matrices, exact, (pair, max(layer, end))))
    return tuple(found)


def memory(shape: Shape, layout: Layout, step: StepShape, way: Way) -> Parts:
    """What the GPU that needs most holds, in bytes."""
    return max((_of_stage(shape, stage, layout, step, way) for stage in stages(shape, layout.pp)), key=_total)


def _total(parts: Parts) -> int:
    return parts.total


def _of_stage(shape: Shape, stage: Stage, layout: Layout, step: StepShape, way: Way) -> Parts:
    size, count = step.split(layout)
    tokens = size * step.seq / layout.tp
    shard = 1 / (layout.tp * layout.fsdp)
    per_token = way.saved.per_token(shape.hidden, shape.kv, shape.intermediate, shape.heads)
    of_hidden, of_intermediate = way.saved.workspace
    in_flight = min(layout.pp - stage.index, count)
    is_last = stage.index == layout.pp - 1
    parts = (
        stage.parameters * way.weights * shard,
        stage.parameters * way.gradients * shard,
        (stage.matrices * way.states + stage.exact * way.exact_states) * shard,
        _gathered(stage, layout, way) / layout.tp,
        per_token * tokens * stage.layers * in_flight,
        tokens * shape.vocabulary * (BF16 + FP32) if is_last else 0,
        tokens * (of_hidden * shape.hidden + of_intermediate * shape.intermediate),
    )
    return Parts(*map(math.ceil, parts))


def _gathered(stage: Stage, layout: Layout, way: Way) -> float:
    """Bytes of whole weights and gradients, before TP splits them, beside the shards."""
    if layout.fsdp == 1:
        return 0
    if layout.pp > 1:
        return stage.parameters * (BF16 + way.gradients)
    pair, largest = stage.largest
    return pair * BF16 + largest * way.gradients
