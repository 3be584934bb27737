"""A concatenation whose parts are stored one by one, each where it belongs, for generated code on a GPU.

Inductor makes a concatenation of computed parts as one pointwise kernel: each element of the result computes all parts and
chooses one. Stored by parts, a kernel computes each part once, and parts of one shape are one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics.operators import operator


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(tuple(parts), dim)


JOINED = operator("joined(Tensor[] parts, int dim) -> Tensor", _joined, pointwise=False)


def _stored(parts: Sequence[Any], dim: int) -> Any:
    lowering = private.inductor_lowering
    return lowering.TensorBox(lowering.ir.ConcatKernel.create(parts, dim))


private.inductor_lowering.register_lowering(JOINED, type_promotion_kind=None)(_stored)
