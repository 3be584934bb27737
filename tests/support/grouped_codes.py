"""``torch._scaled_grouped_mm`` for the CPU, so that graphs made for a device run: the product of decoded operands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile.numerics.formats import FP8_MULTIPLE


def reference(a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """In FP32, by its definition; where rows are contracted it asks for what the kernel for sm_90 asserts."""
    starts = [0, *ends.tolist()]
    parts = list(pairwise(starts))
    if b.dim() == 3:
        rows = [a[i:j].float() * inv_a[i:j, None] @ (b[g].float() * inv_b[g]) for g, (i, j) in enumerate(parts)]
        behind = a.new_zeros(a.shape[0] - starts[-1], b.shape[2], dtype=torch.float32)
        return torch.cat([*rows, behind]).bfloat16()
    assert all((j - i) % FP8_MULTIPLE == 0 for i, j in parts), "a part begins where 16 bytes do"
    by_a, by_b = inv_a.view(len(parts), -1, 1), inv_b.view(len(parts), 1, -1)
    products = [a[:, i:j].float() @ b[i:j].float() * by_a[g] * by_b[g] for g, (i, j) in enumerate(parts)]
    return torch.stack(products).bfloat16()


@contextmanager
def grouped_units() -> Iterator[None]:
    """Every device multiplies FP8, grouped too."""
    reasons = sys.modules["fp8compile.linears.reasons"]
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", reference, "CPU")
    try:
        with mock.patch.object(reasons, "fp8_unsupported_reason", lambda device: None):
            yield
    finally:
        library._destroy()
