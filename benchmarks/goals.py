"""The figures to beat, as data: what others reach or claim, our goal, and the row of a results file that answers it.

A goal is None as long as nothing measured answers it: other hardware is needed (said in ``needs``), or the row is not there.
Claims of others are marked with a dagger; nothing here is ours but what a results file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.markdown import seconds
from benchmarks.harness.results import key_of

Rows = Mapping[str, Mapping[str, Any]]
GB = 10**9


@dataclass(frozen=True)
class Goal:
    """One comparison.

    Attributes:
        what: is measured.
        peer: what others have.
        goal: in words.
        limit: in numbers, and whether it is a floor ("at least") or a ceiling.
        measured: from a file's rows; None if it is not there.
        unit: behind the figure.
        needs: hardware that a single GPU is not.
    """

    what: str
    peer: str
    goal: str
    limit: float
    floor: bool
    measured: Callable[[Rows], float | None]
    unit: str = ""
    needs: str = ""

    def reached(self, value: float) -> bool:
        """Whether a figure is good enough."""
        return value >= self.limit if self.floor else value <= self.limit


def _never(rows: Rows) -> float | None:
    return None


def _at(benchmark: str, case: str, *path: str) -> Callable[[Rows], float | None]:
    """The value at ``path`` in a row."""

    def find(rows: Rows) -> float | None:
        found: Any = rows.get(key_of(benchmark, case), {})
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, (int, float)) else None

    return find


def _scaled(value: Callable[[Rows], float | None], factor: float) -> Callable[[Rows], float | None]:
    def find(rows: Rows) -> float | None:
        found = value(rows)
        return None if found is None else found * factor

    return find


def _over(
    above: Callable[[Rows], float | None], below: Callable[[Rows], float | None]
) -> Callable[[Rows], float | None]:
    def find(rows: Rows) -> float | None:
        a, b = above(rows), below(rows)
        return a / b if a is not None and b else None

    return find


def _seconds(case: str, arm: str) -> Callable[[Rows], float | None]:
    return lambda rows: seconds(dict(rows.get(key_of("layer", case), {})), arm)


def _layer(case: str, arm: str, name: str) -> Callable[[Rows], float | None]:
    return _at("layer", case, "memory", arm, name)


LLAMA2, LLAMA3, GPT = "llama2-7b 8x2048", "llama3-8b 1x8192", "gpt 4096/16384 8x2048"
SEVEN = "7b 1x2048, ours"
STORAGE = "ours, storage only"
GOALS: tuple[Goal, ...] = (
    Goal(
        "saved for backward, Llama-2-7B layer",
        "BF16 22.66†, Transformer Engine 18.33†, COAT 13.33†, Inductor 16.10 (CPU, small)",
        "≤ 6 U",
        6.0,
        False,
        _layer(LLAMA2, "ours", "kept_units"),
        "U",
    ),
    Goal(
        "optimizer states, bits per parameter",
        "FP32 Adam 64, COAT 17.5, torchao fp8 16.25 (no expansion)",
        "≤ 16.7",
        16.7,
        False,
        _at("optimizer_step", "256M bfloat16", "state_bits_per_parameter", "ours e4m3_expanded"),
        "bits",
    ),
    Goal(
        "Llama-2-7B on one GPU, batch 1 × 2048: peak",
        "COAT 79.3 GB†; BF16 and Transformer Engine out of memory",
        "≤ 60 GB",
        60.0,
        False,
        _scaled(_at("training_step", SEVEN, "memory", "ours", "peak"), 1 / GB),
        "GB",
    ),
    Goal(
        "the same: speed",
        "COAT 5906 tokens/s†",
        "≥ 12 000 tokens/s",
        12000.0,
        True,
        _at("training_step", SEVEN, "tokens_per_second", "ours"),
        "tokens/s",
    ),
    Goal(
        "Llama-2-7B on 4 GPUs: activations",
        "BF16 25.8, Transformer Engine 21.9, COAT 16.9 GB†",
        "≤ 12 GB",
        12.0,
        False,
        _never,
        needs="4 GPUs",
    ),
    Goal(
        "Llama-3-8B layer, 1 × 8192: speed over compiled BF16",
        "torchao tensorwise 1.25×†, rowwise 1.10×†",
        "≥ 1.45×",
        1.45,
        True,
        _over(_seconds(LLAMA3, "inductor"), _seconds(LLAMA3, "ours")),
        "×",
    ),
    Goal(
        "the same: peak memory of its step over compiled BF16's",
        "torchao 0.1 GB more than BF16†",
        "≤ 0.6×",
        0.6,
        False,
        _over(_layer(LLAMA3, "ours", "peak_bytes"), _layer(LLAMA3, "inductor", "peak_bytes")),
        "×",
    ),
    Goal(
        "decoder layer 4096/16384, 32 heads, 2048×8, forward + backward",
        "Transformer Engine FP8 21.67 ms†, BF16 35.71 ms†",
        "< 21 ms",
        21.0,
        False,
        _scaled(_seconds(GPT, "ours"), 1e3),
        "ms",
    ),
    Goal(
        "validation loss against the BF16 twin",
        "COAT +0.55 to +0.7 %†",
        "≤ 0.3 %",
        0.3,
        False,
        _scaled(_at("parity", "1b", "validation_gap"), 100.0),
        "%",
    ),
    Goal(
        "worst gradient of a Llama-2-7B layer, FP8 linears and storage",
        "torchao's own test bar: weight gradient 17 dB",
        "≥ 20 dB",
        20.0,
        True,
        _layer(LLAMA2, "ours", "worst_gradient_db"),
        "dB",
    ),
    Goal(
        "storage alone: kept over compiled BF16's, Llama-2-7B layer",
        "PyTorch's act-quant pass 0.54× (2.23 to 1.21 MB, a small block)",
        "≤ 0.40×",
        0.40,
        False,
        _over(_layer(LLAMA2, STORAGE, "kept_bytes"), _layer(LLAMA2, "inductor", "kept_bytes")),
        "×",
    ),
    Goal(
        "the same: worst gradient",
        "PyTorch's act-quant pass 27 to 36 dB",
        "≥ 27 dB",
        27.0,
        True,
        _layer(LLAMA2, STORAGE, "worst_gradient_db"),
        "dB",
    ),
    Goal(
        "full step against COAT on 8 GPUs",
        "Transformer Engine 11 704, COAT 11 241 tokens/s/GPU†",
        "speed not paid for memory",
        0.0,
        True,
        _never,
        needs="8 GPUs",
    ),
)


def table(rows: Rows) -> list[str]:
    """The goals as Markdown, each with what was measured."""
    lines = ["| | others († their claim) | goal | measured |", "|---|---|---|---|"]
    return lines + [f"| {g.what} | {g.peer} | {g.goal} | {_cell(g, rows)} |" for g in GOALS]


def _cell(goal: Goal, rows: Rows) -> str:
    value = goal.measured(rows)
    if value is None:
        return f"needs {goal.needs}" if goal.needs else "not measured"
    return f"{value:.4g} {goal.unit}, goal {'reached' if goal.reached(value) else 'missed'}"
