"""Python's garbage collector runs seldom while a graph is compiled. Changes no numbers.

It looks at every object anew once some hundred more have been made, and a compilation makes millions that stay: of the time
that a Llama of 8 layers with FP8 linears takes, it was a tenth. What is no longer used and refers to nothing that refers back
is freed at once all the same.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = 100_000  # objects made between two looks at the young ones; Python's own default is 700 to 10,000


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Inside, a collection every ``SELDOM`` objects at most. A collector that is off, or looks less often, stays as it is."""
    before = gc.get_threshold()
    if not 0 < before[0] < SELDOM:
        yield
        return
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
