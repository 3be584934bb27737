"""From the bytes that plain Inductor saves for backward to ours: what each rewrite takes away, and what is left.

plain + sum of changes = ours = sum of parts        to the byte, storage by storage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Labels of changes, in the order in which they are made.
CUT = "recomputed by the min-cut"
OPERANDS = "operands of FP8 linears stored as codes"
COPIED = "copies of inputs that the forward overwrites"
RECOMPUTED = "recomputed from what is saved"
ENCODED = "stored as codes"
OBSERVED = "statistics"
# Labels of parts: what is left has its reason for one.
CODES = "codes and their scales"
OTHER = "of other kinds"


@dataclass(frozen=True)
class Amount:
    """Bytes under a label; of a change they are signed. ``tensors`` says how many it is about."""

    label: str
    nbytes: int
    tensors: int = 0

    def __mul__(self, times: int) -> Amount:
        return Amount(self.label, self.nbytes * times, self.tensors * times)


@dataclass(frozen=True)
class Waterfall:
    """What a graph saves for backward: the ``changes`` from plain Inductor's bytes to ours, and the ``parts`` of ours."""

    changes: tuple[Amount, ...] = ()
    parts: tuple[Amount, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Waterfall:
        """What ``dataclasses.asdict`` made, after JSON."""
        return cls(*(tuple(Amount(**amount) for amount in data[name]) for name in ("changes", "parts")))

    def __add__(self, other: Waterfall) -> Waterfall:
        return Waterfall(merged((*self.changes, *other.changes)), merged((*self.parts, *other.parts)))

    def __mul__(self, times: int) -> Waterfall:
        return Waterfall(tuple(c * times for c in self.changes), tuple(p * times for p in self.parts))


def merged(amounts: Iterable[Amount]) -> tuple[Amount, ...]:
    """One amount for each label, in the order in which labels first appear; those of nothing are left out."""
    found: dict[str, Amount] = {}
    for amount in amounts:
        known = found.get(amount.label, Amount(amount.label, 0))
        found[amount.label] = Amount(amount.label, known.nbytes + amount.nbytes, known.tensors + amount.tensors)
    return tuple(amount for amount in found.values() if amount.nbytes or amount.tensors)
