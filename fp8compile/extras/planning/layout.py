"""How GPUs are laid out, FSDP x TP x PP, and how the sequences of a step fall on them.

    gpus = fsdp tp pp;      batch = fsdp micro_batches micro_batch

Stages hold layers as evenly as possible where the embedding and the head count as a layer each, earlier stages taking what is
left over: as torchtitan cuts a model (``generate_llm_fqn_per_model_part``), and why Llama 3 405B has 126 layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8compile.extras.planning.models import Shape

MOST_GPUS = 16384
LONGEST = 2**20  # tokens of a sequence
ENDS = 2  # embedding and head count as a layer each
TENSOR = (1, 2, 4, 8)  # GPUs of a node
PIPELINE = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Layout:
    """GPUs over which weights are sharded (``fsdp``), matrices split (``tp``), layers cut into stages (``pp``)."""

    fsdp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class StepShape:
    """One optimizer step: ``batch`` sequences of ``seq`` tokens over all GPUs.

    Attributes:
        seq: tokens of a sequence.
        batch: sequences of a step.
        micro_batch: sequences that a replica computes at once; None: all of them without a pipeline, one with it.
    """

    seq: int
    batch: int
    micro_batch: int | None = None

    def split(self, layout: Layout) -> tuple[int, int]:
        """Sequences of a micro-batch, and how many of these each replica computes in a step.

        Raises:
            ValueError: the batch does not divide so.
        """
        if self.batch % layout.fsdp:
            raise ValueError(
                f"batch={self.batch} is not a multiple of the {layout.fsdp} replicas of this layout: change batch, tp or pp"
            )
        own = self.batch // layout.fsdp
        size = self.micro_batch or (own if layout.pp == 1 else 1)
        if own % size:
            raise ValueError(
                f"micro_batch={size} does not divide the {own} sequences of a replica: give a divisor of {own}"
            )
        return size, own // size


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage."""
    each, over = divmod(layers + ENDS, pp)
    counts = [each + (stage < over) for stage in range(pp)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def checked(shape: Shape, gpus: int, step: StepShape, tp: int, pp: int) -> Layout:
    """The layout of so many GPUs with this ``tp`` and ``pp``; the rest is FSDP.

    Raises:
        ValueError: it does not divide; the message names the value and what would.
    """
    if gpus % (tp * pp):
        raise ValueError(
            f"gpus={gpus} is not a multiple of tp * pp = {tp} * {pp} = {tp * pp}: change one of the three"
        )
    if shape.kv_heads % tp:
        raise ValueError(
            f"tp={tp} does not divide the {shape.kv_heads} heads of keys of {shape.name}: give one of "
            f"{', '.join(str(n) for n in TENSOR if shape.kv_heads % n == 0)}"
        )
    if step.seq % tp:
        raise ValueError(f"seq={step.seq} is not a multiple of tp={tp}, which splits sequences between matrices")
    if min(stage_layers(shape.layers, pp)) < 1:
        raise ValueError(f"pp={pp} leaves a stage of {shape.name} without one of its {shape.layers} layers: lower pp")
    layout = Layout(gpus // (tp * pp), tp, pp)
    step.split(layout)
    return layout


def check_step(gpus: int, step: StepShape) -> None:
    """Refuse numbers that no layout can serve.

    Raises:
        ValueError: names the value and what it may be.
    """
    numbers = {"gpus": (gpus, MOST_GPUS), "seq": (step.seq, LONGEST), "batch": (step.batch, 2**31)}
    if step.micro_batch is not None:
        numbers["micro_batch"] = (step.micro_batch, 2**31)
    for name, (value, most) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            hint = ": the tokens of one sequence; sequences are counted by batch" if name == "seq" else ""
            raise ValueError(f"{name}={value!r} is not a whole number from 1 to {most}{hint}")


def layouts(
    shape: Shape, gpus: int, step: StepShape, tp: int | None = None, pp: int | None = None
) -> Iterator[Layout]:
    """The layouts that divide evenly: tp up to a node of 8, pp up to 16, or those that are asked for.

    Raises:
        ValueError: tp and pp are both given and do not divide, or nothing does.
    """
    if tp is not None and pp is not None:
        yield checked(shape, gpus, step, tp, pp)
        return
    found, reason = False, ""
    for stages in PIPELINE if pp is None else (pp,):
        for parts in TENSOR if tp is None else (tp,):
            try:
                yield checked(shape, gpus, step, parts, stages)
                found = True
            except ValueError as error:
                reason = str(error)
    if not found:
        raise ValueError(reason)
