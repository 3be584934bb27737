"""A canary of a fault in Inductor's patterns: when upstream mends it, passes/spell_out_alpha.py can go."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

C = 4.0  # a power of two: times it, nothing is rounded


def into_addmm(c: float) -> Tensor:
    a, x, w = torch.ones(32, 16), torch.ones(32, 8), torch.ones(8, 16)
    return torch.compile(lambda a, x, w: torch.add(a, x @ w, alpha=c))(a, x, w)


def into_attention(c: float) -> Tensor:
    def attended(q: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, q.transpose(-2, -1)) / math.sqrt(16)
        return torch.softmax(torch.add(scores, mask, alpha=c), -1) @ q

    q = torch.arange(64.0).view(64, 1).expand(2, 4, 64, 16) / 64
    return torch.compile(attended)(q.contiguous(), torch.arange(64.0).expand(2, 1, 64, 64).contiguous() / 64)


@pytest.mark.parametrize("lost", [into_addmm, into_attention])
def test_inductor_still_loses_alpha(lost: Callable[[float], Tensor]) -> None:
    with torch._inductor.config.patch(force_disable_caches=True):
        found = []
        for c in (1.0, C):
            torch._dynamo.reset()
            found.append(lost(c))
    assert torch.equal(*found), "mended upstream: spell_out_alpha is not needed from this torch on"
