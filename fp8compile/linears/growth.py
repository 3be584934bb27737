"""By how much clipping has made the gradients of the backward that runs now too small so far, in whatever graphs.

What a backward makes next is computed from what it has made, also behind a graph break and in the next block that was
compiled by itself. So ``numerics.delayed.grown_by`` goes on from graph to graph. Another backward begins anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile import _torch as private

OUTSIDE = -1  # of any backward, as in a whole step, which is one graph


class _Growth:
    known = (OUTSIDE, torch.ones(()))  # of which backward, and how much


def so_far(like: Tensor) -> Tensor:
    """A number on the device of ``like``; 1 where nothing was clipped."""
    backward, growth = _Growth.known
    if private.current_backward() == backward != OUTSIDE:
        return growth.to(like.device)
    return torch.ones((), device=like.device)


def note(growth: Tensor) -> None:
    """What the next graph of this backward goes on from."""
    _Growth.known = private.current_backward(), growth
