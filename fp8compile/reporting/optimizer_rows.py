"""What a training step takes with one optimizer or another: bytes of states and gradients, the peak, and whether it fits.

    AdamW (torch.optim)                  two moments in the parameter's dtype; a temporary as large as all gradients
    8-bit AdamW (bitsandbytes layout)    a byte for each element and moment, an FP32 absmax for each block of 256; tensors
                                         below 4096 elements in FP32
    SGD                                  no states, without momentum
    AdamW e4m3_expanded, 4bit            fp8compile.optim.AdamW: what the formats themselves take; steps in place
    ..., gradients released              of each graph the gradients come together, and are dropped before those of the next

Counts of steps (4 bytes a parameter tensor) and bitsandbytes' tables of 2 KiB are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8compile._text import human, printed, table
from fp8compile.numerics.states.registry import ALIASES, state_bytes

OURS = ("e4m3_expanded", "4bit")
BLOCK_8BIT, LEAST_8BIT = 256, 4096  # elements that share an absmax; elements from which bitsandbytes stores 8 bits


@dataclass(frozen=True)
class Trained:
    """A parameter that is trained, as far as it lies on this device.

    Attributes:
        shape: of the local part.
        element_size: bytes of an element.
        formats: of first and second moments, where they do not follow the optimizer's ``state_format``; else None.
    """

    shape: tuple[int, ...]
    element_size: int
    formats: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_size


@dataclass(frozen=True)
class OptimizerFit:
    """A training step with one optimizer, in bytes. True where the peak is no more than the card.

    Attributes:
        name: the name of the optimizer.
        states: the states it keeps.
        gradients: the gradients that are alive at once.
        peak: the most that the step needs at one time.
        card: the memory of the card.
    """

    name: str
    states: int
    gradients: int
    peak: int
    card: int

    def __bool__(self) -> bool:
        return self.peak <= self.card

    @property
    def verdict(self) -> str:
        return (
            f"fits, {human(self.card - self.peak)} to spare" if self else f"{human(self.peak - self.card)} too much"
        )


@dataclass(frozen=True)
class OptimizerFits:
    """One row for each optimizer; ``str()`` is a table."""

    rows: tuple[OptimizerFit, ...]

    def __iter__(self) -> Iterator[OptimizerFit]:
        return iter(self.rows)

    def __str__(self) -> str:
        cells = [(r.name, human(r.states), human(r.gradients), human(r.peak), r.verdict) for r in self.rows]
        return printed([table("", ("optimizer", "states", "gradients", "peak", ""), cells, whole=True)])


@dataclass(frozen=True)
class Need:
    """What an optimizer asks for, in bytes: states, gradients alive at once, temporaries while it steps.

    ``is_released`` says whether each gradient is dropped after its update, in the backward.
    """

    name: str
    states: int
    gradients: int
    update: int
    is_released: bool = False


def needs(parameters: Sequence[Trained], gradients_at_once: int) -> list[Need]:
    """The need of each optimizer; ``gradients_at_once`` is the most alive where each gradient is dropped after its update."""
    whole = sum(p.nbytes for p in parameters)
    encoded = {name: sum(encoded_adamw(p, name) for p in parameters) for name in OURS}
    return [
        Need("AdamW (torch.optim)", 2 * whole, whole, whole),
        Need("8-bit AdamW (bitsandbytes layout)", sum(map(eight_bit_adamw, parameters)), whole, 0),
        Need("SGD without momentum", 0, whole, 0),
        *(Need(f"AdamW {name}", states, whole, 0) for name, states in encoded.items()),
        Need(f"AdamW {OURS[0]}, gradients released", encoded[OURS[0]], gradients_at_once, 0, True),
    ]


def encoded_adamw(parameter: Trained, state_format: str) -> int:
    """Bytes of both moments in fp8compile.optim.AdamW."""
    names = parameter.formats or ALIASES.get(state_format, (state_format, state_format))
    return sum(_state_bytes(name, parameter.shape, signed) for name, signed in zip(names, (True, False), strict=True))


def eight_bit_adamw(parameter: Trained) -> int:
    """Bytes of both moments as bitsandbytes stores them."""
    numel = math.prod(parameter.shape)
    return 2 * (numel + 4 * -(-numel // BLOCK_8BIT) if numel >= LEAST_8BIT else 4 * numel)


@functools.lru_cache(maxsize=4096)
def _state_bytes(name: str, shape: tuple[int, ...], signed: bool) -> int:
    return state_bytes(name, shape, signed=signed)
