"""A kernel that Inductor generated, or one of a library that its code calls, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.cost.device_rates import DeviceRates

GENERATED, LIBRARY = "generated", "of a library"


@dataclass(frozen=True)
class Kernel:
    """One kernel of a graph, in the order in which they run.

    Attributes:
        half: "forward", "backward" or "inference".
        number: its place among the kernels of that half.
        kind: ``GENERATED`` or ``LIBRARY``.
        module: that of the operation that it ends with; "" for the model itself.
        others: other modules of which it computes operations, joined by commas.
        operations: what it computes, the most frequent first: "4 mul, 2 add".
        node: the graph's node that it ends with; "" where that is not known.
        source: where that node stands in the user's code.
        read, written: bytes of the tensors that it reads and writes, each once.
        flops: floating-point operations of its matmul, convolution or attention; 0 for one without.
    """

    half: str
    number: int
    kind: str
    module: str
    others: str
    operations: str
    node: str
    source: str
    read: int
    written: int
    flops: float

    def microseconds(self, rates: DeviceRates) -> float:
        """Predicted by a roofline at the rate in 16 bit: an upper bound for FP8 matmuls."""
        return rates.microseconds(self.flops, rates.bf16, self.moved)

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written
