"""From the bytes that plain Inductor saves for backward to ours: what each rewrite takes away, and what is left.

plain + sum of changes = ours = sum of parts        to the byte, storage by storage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Labels of changes, in the order in which they are made.
CHUNKED = "logits computed in chunks"
CUT = "recomputed by the min-cut"
OPERANDS = "operands of linears stored as codes"
STATES = "states of random generators that nothing draws from"
COPIED = "copies of inputs that the forward overwrites"
SUMS = "sums saved instead of summands"
SOFTMAXES = "softmaxes saved instead of logits"
NORMALISED = "values saved that norms read"
SAVED_STATISTICS = "statistics of rows saved"
RECOMPUTED = "recomputed from what is saved"
GIVEN_UP = "recomputed for the memory budget"
ENCODED = "stored as codes"
OFFLOADED = "offloaded to the host"
OBSERVED = "statistics"
# Labels of parts; the label of a tensor that was left is the reason, as far as its first colon.
UNPAID = "codes cost more than their worth"
CODES = "codes and their scales"
OTHER = "of other kinds"


@dataclass(frozen=True)
class Amount:
    """Bytes under a label, signed for a change. ``tensors`` is the number of tensors they belong to."""

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
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON."""
        return cls(*(tuple(Amount(**amount) for amount in data[name]) for name in ("changes", "parts")))

    def __add__(self, other: Waterfall) -> Waterfall:
        return Waterfall(merged((*self.changes, *other.changes)), merged((*self.parts, *other.parts)))

    def __mul__(self, times: int) -> Waterfall:
        return Waterfall(tuple(c * times for c in self.changes), tuple(p * times for p in self.parts))


def merged(amounts: Iterable[Amount]) -> tuple[Amount, ...]:
    """One amount for each label, in the order in which labels first appear; empty amounts are left out."""
    found: dict[str, Amount] = {}
    for amount in amounts:
        known = found.get(amount.label, Amount(amount.label, 0))
        found[amount.label] = Amount(amount.label, known.nbytes + amount.nbytes, known.tensors + amount.tensors)
    return tuple(amount for amount in found.values() if amount.nbytes or amount.tensors)
