"""In how many bits each saved value is stored, chosen by what its codes were measured to add to the gradients' error.

    S_i(b)    the error of the gradients if value i alone is stored as choice b: a mean of parameters' relative squared errors
    chosen    minimise sum_i S_i(b_i) within a budget of bytes, exactly (GACT, 2206.11357; fp8compile/numerics/knapsack.py)

The sum is that of all codes together as far as their errors are independent. A plain file, part of the recipe and of the
cache key. ``fp8compile/tools/choosing_bits.py`` measures.

A value is recognised by the module and the operation that made it, its dtype, and which of how many such values of the graph
it is. Shapes may differ.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8compile._arguments import is_count
from fp8compile._text import human, printed, table
from fp8compile.numerics.few_bits import FEW_BITS
from fp8compile.numerics.knapsack import cheapest
from fp8compile.recipe.in_a_file import InAFile

FORMAT = 1
ONE_BYTE, WHOLE = "8bit", "exact"
BITS = {**{name: bits for name, bits in sorted(FEW_BITS.items())}, ONE_BYTE: 8, WHOLE: 16}
LEAST, MOST = min(BITS.values()), max(BITS.values())
MEASURE = "Measure again: fp8compile.tools.calibrate_bits(model, batches)"


class Key(NamedTuple):
    """What a saved value is recognised by.

    Attributes:
        module, op: the path of the module and the aten operation that made it.
        dtype: as short text, "bf16".
        nth, of: which of how many saved values with the same three it is, in the graph's order, from 0.
    """

    module: str
    op: str
    dtype: str
    nth: int = 0
    of: int = 1

    def __str__(self) -> str:
        number = f" {self.nth + 1} of {self.of}" if self.of > 1 else ""
        return f"{self.op}{number} of {self.module or 'the model'} ({self.dtype})"


class Choice(NamedTuple):
    """One way to store a value: its bytes, and what it adds to the gradients' error."""

    nbytes: int
    error: float


@dataclass(frozen=True)
class SavedValue:
    """One saved value, the ways in which it may be stored, and the one that is chosen.

    Attributes:
        key: what it is recognised by.
        numel: its elements where it was measured.
        choices: by name, from the fewest bits on: some of "2bit" ... "6bit", then "8bit" (what the recipe stores without bits
            of the value's own) and "exact".
        chosen: the name of one of them.
    """

    key: Key
    numel: int
    choices: tuple[tuple[str, Choice], ...]
    chosen: str

    def __post_init__(self) -> None:
        for name, (nbytes, error) in self.choices:
            if name not in BITS or nbytes < 0 or not 0 <= error < math.inf:
                raise ValueError(
                    f"{name!r} with {nbytes!r} bytes and an error of {error!r} is no choice for {self.key}"
                )
        names = [name for name, _ in self.choices]
        if names != [name for name in BITS if name in names] or not {ONE_BYTE, WHOLE} <= set(names):
            raise ValueError(
                f"{self.key} may be stored as {', '.join(names)}: each once, from the fewest bits on, with {ONE_BYTE} and "
                f"{WHOLE}"
            )
        if self.chosen not in dict(self.choices):
            known = ", ".join(name for name, _ in self.choices)
            raise ValueError(f"{self.key} may be stored as {known}, not as {self.chosen!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of what is chosen, at the sizes that were measured."""
        return dict(self.choices)[self.chosen].nbytes

    @property
    def error(self) -> float:
        """What the chosen format adds to the gradients' error."""
        return dict(self.choices)[self.chosen].error

    def nbytes_at(self, bits: int) -> int:
        """Bytes of the first choice with at least so many bits."""
        return next(choice.nbytes for name, choice in self.choices if BITS[name] >= bits)


@dataclass(frozen=True)
class SavedBits(InAFile):
    """What ``fp8compile.tools.calibrate_bits`` measured and chose: a value for ``Recipe.saved.bits``, a file by ``save``.

    Attributes:
        values: every value that may be stored as codes, in the order in which the model's graphs save them.
    """

    KIND = "choice of saved bits"
    AGAIN = f"{MEASURE}.saved.bits"

    values: tuple[SavedValue, ...]

    def __post_init__(self) -> None:
        twice = [str(key) for key, times in Counter(value.key for value in self.values).items() if times > 1]
        if twice:
            raise ValueError(f"{twice[0]} is there twice")

    def within(self, bits: float | None = None, nbytes: int | None = None) -> SavedBits:
        """The choice with the least error in other bytes, from the same measurements.

        Args:
            bits: the bytes that all values would take in so many bits each, 2 ... 16; between two formats those in between.
                A value that may not have so few counts with the fewest that it may have, as with ``Recipe.saved.format``.
            nbytes: or the bytes of all values together, at the sizes that were measured.

        Raises:
            ValueError: bits out of range, or fewer bytes than the fewest bits take.
        """
        if (bits is None) == (nbytes is None):
            raise ValueError("give bits, such as bits=4.0, or nbytes, and not both")
        budget = self.bytes_at(checked_bits(bits)) if nbytes is None else checked_bytes(nbytes)
        choices = [[choice for _, choice in value.choices] for value in self.values]
        sizes, errors = ([[getattr(c, name) for c in each] for each in choices] for name in ("nbytes", "error"))
        found = cheapest(sizes, errors, budget)
        if found is None:
            least = self.bytes_at(LEAST)
            raise ValueError(
                f"nbytes={nbytes!r} is too little: the fewest bits that the values may have take {least} bytes"
            )
        pairs = zip(self.values, found, strict=True)
        return SavedBits(tuple(dataclasses.replace(value, chosen=value.choices[at][0]) for value, at in pairs))

    def uniform(self, bits: int) -> SavedBits:
        """The choice of ``saved_format`` in so many bits: for each value the first format with at least so many."""
        names = [next(name for name, _ in value.choices if BITS[name] >= bits) for value in self.values]
        pairs = zip(self.values, names, strict=True)
        return SavedBits(tuple(dataclasses.replace(value, chosen=name) for value, name in pairs))

    def bytes_at(self, bits: float) -> int:
        """Bytes of all values in ``bits`` each; between two formats on the line between their bytes."""
        grid = sorted(BITS.values())
        low, high = max(b for b in grid if b <= bits), min(b for b in grid if b >= bits)
        below, above = (sum(value.nbytes_at(b) for value in self.values) for b in (low, high))
        share = 0.0 if low == high else (bits - low) / (high - low)
        return below + int(share * (above - below))

    @property
    def nbytes(self) -> int:
        """Bytes of all values as chosen, at the sizes that were measured."""
        return sum(value.nbytes for value in self.values)

    @property
    def error(self) -> float:
        """The predicted error of the gradients, as ``calibrate_bits`` weighs it."""
        return sum(value.error for value in self.values)

    @property
    def bits_per_element(self) -> float:
        """Metadata included, over all values."""
        return 8 * self.nbytes / max(sum(value.numel for value in self.values), 1)

    @property
    def formats(self) -> frozenset[str]:
        """The names of all that is chosen for some value."""
        return frozenset(value.chosen for value in self.values)

    def find(self, key: Key) -> SavedValue | None:
        """The value with this key; None where it was not measured."""
        return self._by_key.get(key)

    def said_of(self, module: str) -> tuple[Any, ...]:
        """What is chosen for values made in the module at a path itself: equal for modules that it does not tell apart."""
        return self._by_module.get(module, ())

    @functools.cached_property
    def _by_key(self) -> Mapping[Key, SavedValue]:
        return {value.key: value for value in self.values}

    @functools.cached_property
    def _by_module(self) -> Mapping[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        for value in self.values:
            found[value.key.module] = (*found.get(value.key.module, ()), (*value.key[1:], value.chosen))
        return found

    @functools.cached_property
    def text(self) -> str:
        """What ``save`` writes: JSON, a value a line. Equal choices have equal texts."""
        lines = [
            json.dumps({**v.key._asdict(), "numel": v.numel, "chosen": v.chosen, "choices": dict(v.choices)})
            for v in self.values
        ]
        return f'{{"format": {FORMAT}, "values": [\n ' + ",\n ".join(lines) + "\n]}\n"

    @classmethod
    def from_text(cls, text: str, where: str = "this text") -> SavedBits:
        """The choice that ``text`` holds; ``where`` is what errors call it.

        Raises:
            ValueError: it holds none, one of another version of the file, or a format that a value may not have.
        """
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or not {"format", "values"} <= found.keys():
                raise ValueError("it has no 'format' and 'values'")
            if found["format"] != FORMAT:
                raise ValueError(f"it has format {found['format']}, and this is format {FORMAT}")
            return cls(tuple(_value_of(each) for each in found["values"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is no {cls.KIND} of fp8compile: {error}. {cls.AGAIN}.save(path).") from None

    def __repr__(self) -> str:
        return f"SavedBits({self.digest}, {len(self.values)} values, {self.bits_per_element:.2f} bits)"

    def __str__(self) -> str:
        """A table of what is chosen, the largest part of the error first."""
        ordered = sorted(self.values, key=lambda value: -value.error)
        rows = [(str(v.key), f"{v.numel:,}", v.chosen, human(v.nbytes), f"{v.error:.1e}") for v in ordered]
        total = (f"all {len(rows)}", "", f"{self.bits_per_element:.2f} bits", human(self.nbytes), f"{self.error:.1e}")
        columns = ("saved value", "elements", "stored as", "bytes", "adds to the gradients' error")
        return printed([table("", columns, [*rows, total], whole=True)])


def checked_bits(bits: Any) -> float:
    """``bits`` as a number from 2 to 16; raises ValueError else."""
    if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not LEAST <= bits <= MOST:
        raise ValueError(
            f"bits must be a number from {LEAST} to {MOST}, bits per element of what is saved, not {bits!r}."
        )
    return float(bits)


def checked_bytes(nbytes: Any) -> int:
    """``nbytes`` as a number of bytes; raises ValueError else."""
    if not is_count(nbytes):
        raise ValueError(f"nbytes must be a whole number of bytes, not {nbytes!r}.")
    return int(nbytes)


def _value_of(line: Mapping[str, Any]) -> SavedValue:
    fields = dict(line)
    choices = tuple((name, Choice(*pair)) for name, pair in fields.pop("choices").items())
    chosen, numel = fields.pop("chosen"), fields.pop("numel")
    return SavedValue(Key(**fields), numel, choices, chosen)
