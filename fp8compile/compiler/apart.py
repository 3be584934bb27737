"""A second compilation while Dynamo hands over one graph: it must leave no traces in the first one's tracing context.

AOTAutograd notes on the context what it found: the strides of outputs, and which saved tensors no one else holds. The
backward compiles only at the first ``.backward()``, and then asks the same context which of its inputs it may overwrite. Had
another compilation written its answer there, the backward would overwrite what the user still has.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from fp8compile import _torch as private


@contextlib.contextmanager
def compiled_apart() -> Iterator[None]:
    """Compile in here with a tracing context of its own, a copy of the current one, if there is any."""
    context = private.TracingContext.try_get()
    with private.tracing(copy.copy(context)) if context is not None else contextlib.nullcontext():
        yield
