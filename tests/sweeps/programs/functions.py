"""torch.autograd.Function: backwards by hand, kept inputs, outputs and neither, dirty inputs, gradients not needed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sweeps.registry import leaf, linear, program


class Swish(torch.autograd.Function):
    """x sigmoid(x), from the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))


@program(leaf(64, 256), model=linear(256, 256))
def swish_by_hand(m: Any, x: Tensor) -> Tensor:
    return Swish.apply(m(x)) * x


class Intermediate(torch.autograd.Function):
    """exp(-x²), from an intermediate that is neither input nor output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner = -x * x
        ctx.save_for_backward(x, inner)
        return inner.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, inner = ctx.saved_tensors
        return g * inner.exp() * -2 * x


@program(leaf(64, 256), model=linear(256, 256))
def an_intermediate_is_kept_and_exponentiated(m: Any, x: Tensor) -> Tensor:
    return Intermediate.apply(3 * m(x))


class StraightThrough(torch.autograd.Function):
    """round(x), with the gradient of the identity, clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1.0)


@program(leaf(64, 256), model=linear(256, 256))
def a_straight_through_round(m: Any, x: Tensor) -> Tensor:
    return StraightThrough.apply(4 * m(x)).sin() * x


class Dirty(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@program(leaf(64, 256), model=linear(256, 256))
def a_dirty_input(m: Any, x: Tensor) -> Tensor:
    return Dirty.apply(m(x)).sigmoid() * x


class MatMul(torch.autograd.Function):
    """a @ b; makes only the gradients that are needed."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a @ b * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        first = g @ b.t() * ctx.scale if ctx.needs_input_grad[0] else None
        return first, (a.t() @ g * ctx.scale if ctx.needs_input_grad[1] else None), None


@program(leaf(64, 256), model=linear(256, 256))
def gradients_where_needed(m: Any, x: Tensor) -> Tensor:
    fixed = torch.linspace(-1, 1, 256 * 256).view(256, 256)
    return MatMul.apply(x.tanh(), m[0].weight, 0.5).sin() + MatMul.apply(m(x), fixed, 0.1).tanh()


class Compare(torch.autograd.Function):
    """The row's maximum; its gradient goes where the kept input equals the kept output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        top = x.amax(-1, keepdim=True)
        ctx.save_for_backward(x, top)
        return top

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, top = ctx.saved_tensors
        hit = (x == top).to(x.dtype)
        return g * hit / hit.sum(-1, keepdim=True)


@program(leaf(64, 256), model=linear(256, 256))
def a_maximum_by_equality(m: Any, x: Tensor) -> Tensor:
    return (m(x) / Compare.apply(m(x).abs())).sin()


class Reversal(torch.autograd.Function):
    """The identity forward, -g backward (domain adaptation)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.neg()


@program(leaf(64, 256), model=linear(256, 256))
def gradient_reversal(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y.sigmoid() * Reversal.apply(y).tanh()


class Pair(torch.autograd.Function):
    """Two outputs, one of them without a gradient; both inputs kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > y
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(mask)
        return x * y, mask

    @staticmethod
    def backward(ctx: Any, g: Tensor, unused: Any) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, g * x


@program(leaf(64, 256), model=linear(256, 256))
def one_output_is_not_differentiable(m: Any, x: Tensor) -> Tensor:
    product, mask = Pair.apply(m(x), x)
    return product.sin() * mask


class Logarithm(torch.autograd.Function):
    """log x, whose backward divides by the kept input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.log()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / ctx.saved_tensors[0]


@program(leaf(64, 256), model=linear(256, 256))
def a_logarithm_by_hand(m: Any, x: Tensor) -> Tensor:
    return Logarithm.apply(F.softplus(8 * m(x)) + 1e-5)
