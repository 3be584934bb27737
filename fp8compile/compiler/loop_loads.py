"""A mend of Inductor: what a kernel loads inside a loop is not taken for known behind it. Changes no numbers.

    for the elements of a row:              kind = kinds[place];   sum += table[kind, element]
    for the elements of the row again:      ... table[kind, element] ...          NameError: kind is not defined

What does not depend on the element is loaded before the loop, but not where its place has to be checked first, or is masked:
that is loaded inside, and the kernel's text still goes on with it behind the loop (torch 2.13; not 2.11, nor 2.15). Triton
refuses such a kernel. Plain Inductor makes it where what is looked up for each row is read by a norm that goes through the
row twice; ours makes it more often, since places that are saved in a byte are not stored in eight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8compile import _torch as private
from fp8compile.fx.inductor_choices import loading

INSIDE = "fp8compile_loaded_inside"  # of a kernel: what was loaded in a loop


def with_loads_in_loops(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor that loads once more behind a loop what was loaded inside it."""
    return inner_compile if private.LOADS_IN_LOOPS else loading(_once_more)(inner_compile)


def _once_more(theirs: Callable[..., Any], kernel: Any, name: str, index: Any) -> Any:
    before = len(kernel.compute._lines)
    value = theirs(kernel, name, index)
    inside = vars(kernel).setdefault(INSIDE, set())
    if len(kernel.compute._lines) > before:
        inside.add(value)
    if value in inside:
        kernel.outside_loop_vars.discard(value)
    return value
