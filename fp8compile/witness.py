"""A witness of a tensor's version: no elements and none of its memory, but its version counter.

    w = x.detach(); w.data = empty        w._version goes on counting the in-place changes of x and of all its views

``detach`` shares the counter, and ``set_data`` gives a tensor other memory under the counter that it has. AOTAutograd keeps
what a forward returns for its backward by ``save_for_backward``, which notes the version and raises "modified by an inplace
operation" if it is another one when the backward asks: that works for a witness as for the tensor itself, whose memory may
be gone by then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile import torch_private as private

_library = torch.library.Library("fp8compile", "DEF")
_library.define("witness(Tensor x) -> Tensor")


@torch.library.impl(_library, "witness", "CompositeExplicitAutograd")
def _witness(x: Tensor) -> Tensor:
    with private.views_share_versions():  # not so by itself in the forward of a compiled graph
        shared = x.detach()
    shared.data = x.new_empty(0)
    return shared


@torch.library.register_fake("fp8compile::witness", lib=_library)
def _fake_witness(x: Tensor) -> Tensor:
    return x.new_empty(0)


def witness(x: Tensor) -> Tensor:
    """An empty tensor that shares the version counter of ``x``."""
    seen: Tensor = torch.ops.fp8compile.witness.default(x)
    return seen
