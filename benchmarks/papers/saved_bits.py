"""What autograd saves, kept in few bits by hooks: GACT's way, for ablations of models that nobody compiles.

    a saved tensor's number    its place in the order in which one forward saves tensors
    bits                       of each number: 2 to 6 (``numerics.few_bits``) or 8 (INT8 groups); others stay exact

Parameters, integers and small tensors (the statistics of norms and of attention) are never encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.numerics.codecs import Groupwise
from fp8compile.numerics.few_bits import BITS, FewBits
from fp8compile.numerics.formats import INT8
from fp8compile.numerics.knapsack import cheapest

LEAST_NUMEL = 2048
GROUP_SIZE = 128
CHOICES = (*BITS, 8)


class SavedTensors:
    """The saved tensors of a model's forward, seen and encoded while ``encoding`` is entered.

    Args:
        model: its parameters are left alone; each call of it starts the numbers anew.
        bits: by number; a number that is not there stays exact.
        rounding: of two to six bits, as in ``FewBits``.

    Attributes:
        shapes: of the last forward, the shape of each tensor that may be encoded, by number.
    """

    def __init__(self, model: nn.Module, bits: Mapping[int, int], rounding: str = "stochastic") -> None:
        self.model, self.bits, self.rounding = model, bits, rounding
        self.shapes: list[tuple[int, ...]] = []

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Encode what is saved by forwards inside."""
        self._parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        handle = self.model.register_forward_pre_hook(lambda *_: self.shapes.clear())
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked):
                yield
        finally:
            handle.remove()

    def _packed(self, x: Tensor) -> Any:
        if not self._may_be_encoded(x):
            return x
        self.shapes.append(tuple(x.shape))
        bits = self.bits.get(len(self.shapes) - 1)
        if bits is None:
            return x
        if bits == 8:
            codec = Groupwise(INT8, GROUP_SIZE)
            return codec, codec.encode(x.detach()), x.shape, x.dtype
        few = FewBits(bits, GROUP_SIZE, self.rounding)
        return few, few.encode(x.detach()), x.shape, x.dtype

    def _may_be_encoded(self, x: Tensor) -> bool:
        large = x.is_floating_point() and x.numel() >= LEAST_NUMEL
        return large and x.untyped_storage().data_ptr() not in self._parameters


def _unpacked(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    codec, parts, shape, dtype = kept
    if isinstance(codec, FewBits):
        codes, inv_scale, zero_point = parts
        return codec.decode(codes, inv_scale, zero_point, shape, dtype)
    decoded: Tensor = codec.decode(*parts, dtype)
    return decoded


def nbytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a tensor of ``shape``, metadata included."""
    return Groupwise(INT8, GROUP_SIZE).nbytes(shape) if bits == 8 else FewBits(bits, GROUP_SIZE).nbytes(shape)


def noise(bits: int) -> float:
    """The variance of a value in so many bits, in units that all tensors share: the square of a step of its range."""
    return float((2**bits - 1) ** -2)


def choose_bits(
    sensitivities: Sequence[float],
    shapes: Sequence[Sequence[int]],
    budget: int,
    choices: Sequence[int] = CHOICES,
) -> tuple[int, ...]:
    """GACT's choice: the bits of each tensor with the least sum of sensitivity * noise(bits) within ``budget`` bytes.

    Raises:
        ValueError: the fewest bits for all take more bytes than the budget.
    """
    sizes = [[nbytes(shape, bits) for bits in choices] for shape in shapes]
    costs = [[sensitivity * noise(bits) for bits in choices] for sensitivity in sensitivities]
    found = cheapest(sizes, costs, budget)
    if found is None:
        fewest = sum(map(min, sizes))
        raise ValueError(f"{min(choices)} bits for all take {fewest} bytes, more than the budget of {budget}")
    return tuple(choices[each] for each in found)
