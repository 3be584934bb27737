"""What a Llama layer saves for backward, per token, from counts in compiled graphs.

    saved = (a hidden + b kv + c intermediate) bytes per element + 4 heads + 8

``kv`` is the width of keys: heads of keys times the size of a head. The last terms are attention's log-sum-exp, FP32 for
each head, and the two norms' statistics, FP32. With plain Inductor a, b, c are 6, 2, 3: the layer's input, both norms'
results, q, attention's result, the second residual; k, v; gate, up and their product. Ours recomputes both norms' results
and the product, and stores the others as INT8 with a BF16 scale for each 128. Left out: the mean of
attention's result, 2 bytes for each channel of a sequence.

Sources: ``LAYERS`` are figures of benchmarks/results/static-cost-predicted.json, counted in graphs that were lowered for
an H100; tests/extras/planning/test_measured.py holds them, and the formula, against that file and layers captured anew.
"""

from __future__ import annotations

from dataclasses import dataclass

STATISTIC_BYTES = 4  # bytes of an FP32 number
NORMS = 2  # of a layer
GROUP, SCALE = 128, 2  # elements to a scale, its bytes
GROUP_OF_STATES, BESIDE_STATES = 128, 5  # e4m3_expanded: an FP32 amax and a one-byte exponent to a group


@dataclass(frozen=True)
class SavedElements:
    """Elements that a layer saves per token, as multiples of three widths, and bytes for each.

    ``workspace`` are bytes per token of the most that forward or backward of one layer needs beyond these at one time, as
    multiples of hidden and intermediate: what ``Report.fits`` estimates for a layer with intermediate >= 2 hidden.
    """

    hidden: int
    kv: int
    intermediate: int
    element: float
    workspace: tuple[int, int]

    def per_token(self, hidden: int, kv: int, intermediate: int, heads: int) -> float:
        """Bytes saved for backward per token by one layer."""
        elements = self.hidden * hidden + self.kv * kv + self.intermediate * intermediate
        return elements * self.element + STATISTIC_BYTES * (heads + NORMS)


PLAIN = SavedElements(6, 2, 3, 2.0, (4, 2))
OURS = SavedElements(4, 2, 2, 1 + SCALE / GROUP, (2, 6))
STATE = 1 + BESIDE_STATES / GROUP_OF_STATES  # bytes per element of a moment in the default format
STATE_FORMAT = "e4m3_expanded"


@dataclass(frozen=True)
class Layer:
    """A layer that was counted: its shape, and what it keeps in bytes."""

    name: str
    tokens: int
    sequences: int
    hidden: int
    kv: int
    intermediate: int
    heads: int
    plain: int
    ours: int


SOURCE = "benchmarks/results/static-cost-predicted.json"
LAYERS = (
    Layer("Llama-3-8B, 1x8192", 8192, 1, 4096, 1024, 14336, 32, 1141964824, 393027652),
    Layer("Llama-2-7B, 8x2048", 16384, 8, 4096, 4096, 11008, 32, 2158100504, 777584708),
)
