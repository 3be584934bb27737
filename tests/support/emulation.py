"""What an FP8 linear must compute, written a second time: every operand of every product through a cast of its own.

y = q(x) q(W)' + b      dx = q5(dy) q(W)      dW = q5(dy)' q(x)      q: E4M3, q5: E5M2, one scale per tensor
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMATS = ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0))


def cast(x: Tensor, gradient: bool = False) -> Tensor:
    """``x`` to FP8 and back under the scale ``amax / max``; NaN everywhere if the largest is not finite."""
    dtype, largest = FORMATS[gradient]
    amax = x.abs().max()
    inv_scale = torch.where(amax.isfinite(), (amax * (1.0 / largest)).clamp_min(2.0**-126), torch.nan)
    return (x * (1.0 / inv_scale)).clamp(-largest, largest).to(dtype).float() * inv_scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(cast(x), cast(weight))
        return cast(x) @ cast(weight).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = cast(dy, gradient=True)
        return dy @ weight, dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with FP8 operands in all three products."""
    y: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def results(fn: Callable[..., Tensor], inputs: list[Tensor], *args: Tensor) -> list[Tensor]:
    """The output of ``fn(*args)`` and the gradients of a fixed projection of it by ``inputs``."""
    out = fn(*args)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out.detach().clone(), *torch.autograd.grad((out * weight).sum(), inputs)]


def emulated(fn: Callable[..., Tensor], inputs: list[Tensor], *args: Tensor) -> list[Tensor]:
    """``results`` with every ``F.linear`` in FP8, those of nn.Linear and of a checkpoint's second run too."""
    with mock.patch.object(F, "linear", linear):
        return results(fn, inputs, *args)


def trained(module: nn.Module, *args: Tensor) -> list[Tensor]:
    """Parameters and arguments that need a gradient."""
    return [t for t in (*module.parameters(), *args) if t.requires_grad]
