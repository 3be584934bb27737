"""Arguments checked where they are given: a ``ValueError`` names the option, the value and what it should be.

``bool`` is no number here, although Python says so: ``lr=True`` is a slip, and would train at a rate of 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

from torch import Tensor

FLAGS = (True, False)


def is_number(value: object) -> bool:
    """Whether it is a real number, of Python or numpy, but no bool. NaN and inf are."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it is a real number that is neither inf nor NaN."""
    return is_number(value) and math.isfinite(value)  # type: ignore[arg-type]


def is_count(value: object) -> bool:
    """Whether it is a whole number, but no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, *, low: float = 0.0, below: float = math.inf) -> None:
    """Raises ValueError unless ``low <= value < below`` and value is a finite number."""
    if not (is_finite(value) and low <= value < below):  # type: ignore[operator]
        bounds = f"at least {low:g}" + (f" and below {below:g}" if below < math.inf else " and finite")
        raise ValueError(f"{name}={value!r}: a number is needed, {bounds}")


def check_number_or_tensor(name: str, value: object, *, low: float = 0.0, below: float = math.inf) -> None:
    """The same for what may also be a tensor of one real element, which is not read: the host would wait for it."""
    if not isinstance(value, Tensor):
        check_number(name, value, low=low, below=below)
    elif value.numel() != 1 or value.is_complex():
        raise ValueError(f"{name} is a tensor {[*value.shape]} of {value.dtype}: one real element is needed")


def check_count(name: str, value: object, *, low: int = 0) -> None:
    """Raises ValueError unless value is a whole number, ``low`` or more."""
    if not (is_count(value) and value >= low):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: a whole number is needed, {low} or more")


def check_one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises ValueError unless value is one of these, of the same type: 1 is not True."""
    known = list(choices)
    if not any(type(value) is type(each) and value == each for each in known):
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, known))} is needed")
