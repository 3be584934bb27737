"""Arguments checked where they are given: a ``ValueError`` names the option, the value and what it should be.

``bool`` does not count as a number here, although it does in Python: ``lr=True`` is a slip, and would train at a
learning rate of 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

from torch import Tensor

FLAGS = (True, False)


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, Python's or NumPy's, and not a bool. NaN and inf count as numbers."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether ``value`` is a real number that is neither inf nor NaN."""
    return is_number(value) and math.isfinite(value)  # type: ignore[arg-type]


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, *, low: float = 0.0, below: float = math.inf) -> None:
    """Raises ValueError unless ``low <= value < below`` and value is a finite number."""
    if not (is_finite(value) and low <= value < below):  # type: ignore[operator]
        bounds = f"at least {low:g}" + (f" and below {below:g}" if below < math.inf else " and finite")
        raise ValueError(f"{name}={value!r}: a number is needed, {bounds}")


def check_number_or_tensor(name: str, value: object, *, low: float = 0.0, below: float = math.inf) -> None:
    """The same for a value that may also be a tensor of one real element. A tensor is not read: the host would wait."""
    if not isinstance(value, Tensor):
        check_number(name, value, low=low, below=below)
    elif value.numel() != 1 or value.is_complex():
        raise ValueError(f"{name} is a tensor {[*value.shape]} of {value.dtype}: one real element is needed")


def check_count(name: str, value: object, *, low: int = 0) -> None:
    """Raises ValueError unless value is a whole number, ``low`` or more."""
    if not (is_count(value) and value >= low):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: a whole number is needed, {low} or more")


def check_one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises ValueError unless value is one of ``choices`` and of the same type: 1 is not True."""
    known = list(choices)
    if not any(type(value) is type(each) and value == each for each in known):
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, known))} is needed")
