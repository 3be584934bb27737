"""All layouts of a run beside each other: rows, text of 80 columns, JSON. Every figure is an estimate per GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from fp8compile._text import printed, table, wrapped
from fp8compile.extras.planning.bytes import BASELINE, FP8COMPILE, Parts, memory
from fp8compile.extras.planning.layout import Layout, StepShape, check_step, layouts
from fp8compile.extras.planning.models import Shape, shape_for
from fp8compile.extras.planning.traffic import SentBytes, traffic

GIB = 1024**3
WIDTH, MOST_ROWS = 80, 12
NOTES = (
    "BF16 is plain Inductor and AdamW with FP32 master weights and moments. Ours is the default recipe and "
    'fp8compile.optim.AdamW(model, master="split"). Both send the same bytes. Not counted: the CUDA context, buffers of '
    "NCCL, fragmentation. No block is checkpointed. Nothing here says how fast a layout is."
)


@dataclass(frozen=True)
class LayoutRow:
    """One layout: a micro-batch's sequences, how many of these a step has, memory both ways, bytes sent."""

    layout: Layout
    micro_batch: int
    micro_batches: int
    bf16: Parts
    ours: Parts
    sent: SentBytes

    def fits(self, card: int) -> str:
        """Which of both fit on a card of so many bytes: "both", "ours", "BF16" or "none"."""
        bf16, ours = self.bf16.total <= card, self.ours.total <= card
        return "both" if bf16 and ours else "ours" if ours else "BF16" if bf16 else "none"


@dataclass(frozen=True)
class Plan:
    """The layouts of a run, the best first: those that fit by bytes sent, then the others by what ours needs."""

    shape: Shape
    gpus: int
    step: StepShape
    card: int
    rows: tuple[LayoutRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, in bytes, as JSON takes it."""
        return {
            "estimates": True,
            "shape": {**dataclasses.asdict(self.shape), "parameters": self.shape.parameters},
            "gpus": self.gpus,
            "step": dataclasses.asdict(self.step),
            "card": self.card,
            "rows": [_as_dict(row, self.card) for row in self.rows],
        }

    def __str__(self) -> str:
        rows = self.rows[:MOST_ROWS]
        left = len(self.rows) - len(rows)
        parts: list[RenderableType] = [
            _head(self),
            table("", COLUMNS, [_cells(row, self.card) for row in rows], whole=True),
            *([f"and {left} more: --json, or --tp and --pp"] if left else []),
            "",
            _title(rows[0].layout),
            table("", ("GiB", "BF16", "ours"), _broken_down(rows[0]), whole=True),
            "",
            wrapped(NOTES, WIDTH),
        ]
        return printed(parts, width=WIDTH)


def plan(
    parameters: float,
    gpus: int,
    seq: int = 8192,
    batch: int | None = None,
    card_gib: float = 80.0,
    tp: int | None = None,
    pp: int | None = None,
    micro_batch: int | None = None,
) -> Plan:
    """Estimate memory and traffic per GPU of a Llama-like model.

    Args:
        parameters: how many, such as 70e9; see ``shape_for``.
        gpus: all of them.
        seq: tokens of a sequence.
        batch: sequences of a step over all GPUs; None: one for each GPU.
        card_gib: memory of a GPU in GiB.
        tp, pp: the layout; None: every one that divides evenly.
        micro_batch: sequences computed at once; None: all of a replica's without a pipeline, one with it.

    Raises:
        ValueError: a number is out of range, or nothing divides evenly; the message has the cure.
    """
    if isinstance(card_gib, bool) or not card_gib > 0:
        raise ValueError(f"card_gib={card_gib!r} is not the memory of a GPU in GiB, such as 80")
    shape, step = shape_for(parameters), StepShape(seq, gpus if batch is None else batch, micro_batch)
    for name, value in (("tp", tp), ("pp", pp)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not a whole number of at least 1")
    check_step(gpus, step)
    card = int(card_gib * GIB)
    rows = [_row(shape, layout, step) for layout in layouts(shape, gpus, step, tp, pp)]
    return Plan(shape, gpus, step, card, tuple(sorted(rows, key=lambda row: _rank(row, card))))


def _row(shape: Shape, layout: Layout, step: StepShape) -> LayoutRow:
    bf16, ours = (memory(shape, layout, step, way) for way in (BASELINE, FP8COMPILE))
    return LayoutRow(layout, *step.split(layout), bf16, ours, traffic(shape, layout, step))


def _rank(row: LayoutRow, card: int) -> tuple[bool, int]:
    fits = row.ours.total <= card
    return not fits, row.sent.total if fits else row.ours.total


COLUMNS = ("FSDP", "TP", "PP", "micro-batches", "BF16", "ours", "fits", "sent: FSDP", "TP", "PP")


def _cells(row: LayoutRow, card: int) -> tuple[str, ...]:
    sizes = (row.layout.fsdp, row.layout.tp, row.layout.pp, f"{row.micro_batches} of {row.micro_batch}")
    sent = (row.sent.fsdp, row.sent.tp, row.sent.pp)
    return (
        *map(str, sizes),
        _gib(row.bf16.total),
        _gib(row.ours.total),
        row.fits(card),
        *(_gib(nbytes) if nbytes else "-" for nbytes in sent),
    )


def _broken_down(row: LayoutRow) -> list[tuple[str, ...]]:
    pairs = zip(dataclasses.asdict(row.bf16).items(), dataclasses.astuple(row.ours), strict=True)
    return [
        *((name, _gib(bf16), _gib(ours)) for (name, bf16), ours in pairs),
        ("all", _gib(row.bf16.total), _gib(row.ours.total)),
    ]


def _head(made: Plan) -> str:
    shape = made.shape
    return (
        f"{shape.parameters / 1e9:.4g}e9 parameters, {shape.name}: {shape.layers} layers, hidden {shape.hidden},\n"
        f"intermediate {shape.intermediate}, {shape.heads} heads, {shape.kv_heads} of keys, vocabulary "
        f"{shape.vocabulary}\n"
        f"{_counted(made.gpus, 'GPU')} of {made.card / GIB:g} GiB; a step: {_counted(made.step.batch, 'sequence')} of "
        f"{_counted(made.step.seq, 'token')}\n\n"
        "ESTIMATES in GiB, of the GPU that needs most: memory, bytes sent in a step"
    )


def _title(layout: Layout) -> str:
    return f"Memory of the first layout, FSDP {layout.fsdp} x TP {layout.tp} x PP {layout.pp}, estimated:"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _as_dict(row: LayoutRow, card: int) -> dict[str, Any]:
    found = dataclasses.asdict(row)
    for name, of in (("bf16", row.bf16), ("ours", row.ours), ("sent", row.sent)):
        found[name]["total"] = of.total
    return {**found, "fits": row.fits(card)}
