"""Comparisons: maxima, masks, clamps, signs, medians, orders of what is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import index, leaf, linear, program


@program(leaf(64, 256), model=linear(256, 256))
def relu_then_amax(m: Any, x: Tensor) -> Tensor:
    return m(x).relu().amax(-1).sin()


@program(leaf(64, 256), model=linear(256, 256))
def amax_and_amin_of_abs(m: Any, x: Tensor) -> Tensor:
    y = m(x).abs()
    return y.amax(0).sin() + y.amin(0) * y.amax()


@program(leaf(64, 256), model=linear(256, 256))
def amax_of_indexed_rows(m: Any, x: Tensor) -> Tensor:
    y = m(x)[torch.arange(64).flip(0)]
    return (y - y.amax(-1, keepdim=True)).sin()


@program(leaf(64, 256), model=linear(256, 256))
def amax_of_a_cube(m: Any, x: Tensor) -> Tensor:
    return m(x).pow(3).amax(-1).tanh()


@program(leaf(64, 256), model=linear(256, 256))
def range_normalization(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    return ((y - low) / (high - low)).sin()


@program(leaf(64, 256), model=linear(256, 256))
def fake_quantization_by_amax(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    scale = y.abs().amax() / 127
    rounded = (y / scale).round().clamp(-127, 127) * scale
    return (y + (rounded - y).detach()).sin() * scale


@program(leaf(64, 256), model=linear(256, 256))
def where_by_a_threshold(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return torch.where(y > 0.3, y.square(), -y.sigmoid())


@program(leaf(64, 256), model=linear(256, 256))
def where_of_two_activations(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return torch.where(y > x, y * x, y.sin())


@program(leaf(64, 256), model=linear(256, 256))
def clamps_on_both_sides(m: Any, x: Tensor) -> Tensor:
    return m(x).clamp(-0.4, 0.7) * x.clamp_min(0.1).sqrt()


@program(leaf(64, 256), model=linear(256, 256))
def hard_activations(m: Any, x: Tensor) -> Tensor:
    y = 4 * m(x)
    return F.hardswish(y) + F.hardtanh(y) * F.hardsigmoid(x) + F.relu6(y).sin()


@program(leaf(64, 256), model=linear(256, 256))
def shrinks_and_thresholds(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return F.softshrink(y, 0.2) + F.hardshrink(y, 0.3).sin() * F.threshold(x, 0.1, -1.0)


@program(leaf(64, 256), model=linear(256, 256))
def sign_times_square(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y.sign() * y.square() + y.sgn() * x


@program(leaf(64, 256), leaf(64, 256))
def maximum_and_minimum(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a.sin(), b) * torch.minimum(a, b.tanh())


@program(leaf(64, 256))
def a_maximum_with_ties(m: Any, x: Tensor) -> Tensor:
    return (x * 2).round().div(2).add(x - x.detach()).amax(-1).sin()


@program(leaf(64, 256), model=linear(256, 256))
def median_and_kth_value(m: Any, x: Tensor) -> Tensor:
    y = m(x).tanh()
    return y.median(-1).values * y.kthvalue(17, -1).values + y.quantile(0.3, -1)


@program(leaf(64, 256), model=linear(256, 256))
def sort_and_weigh(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y.sort(-1).values.sin() * torch.linspace(0, 1, 256) * y.argsort(-1)


@program(leaf(64, 256), model=linear(256, 256))
def topk_and_softmax(m: Any, x: Tensor) -> Tensor:
    values, where = m(x).topk(8, -1)
    return values.softmax(-1) * x.gather(1, where)


@program(leaf(64, 256), model=linear(256, 256))
def mean_of_the_largest_tenth(m: Any, x: Tensor) -> Tensor:
    loss = (m(x) - x).square().mean(-1)
    return loss[loss >= loss.quantile(0.9)].sum() + loss.topk(6).values.mean()


@program(leaf(8, 16, 16, 16), model=lambda: nn.Conv2d(16, 16, 3, padding=1))
def max_pooling_of_relu(m: Any, x: Tensor) -> Tensor:
    return F.max_pool2d(m(x).relu(), 2).sin()


@program(leaf(8, 16, 16, 16), model=lambda: nn.Conv2d(16, 16, 3, padding=1))
def adaptive_max_and_average_pooling(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return F.adaptive_max_pool2d(y, 3).sin() * F.adaptive_avg_pool2d(y.sigmoid(), 3)


@program(leaf(64, 256), model=linear(256, 512))
def maxout(m: Any, x: Tensor) -> Tensor:
    return m(x).view(64, 256, 2).max(-1).values.sin()


@program(leaf(64, 256), leaf(64, 256), leaf(64, 256))
def triplet_hinge_and_huber(m: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (
        F.triplet_margin_loss(a, b, c)
        + F.huber_loss(a, b, delta=0.5)
        + F.smooth_l1_loss(b, c)
        + F.margin_ranking_loss(a[:, 0], b[:, 0], c[:, 0].sign(), margin=0.2)
    )


@program(leaf(64, 256), index(256, 64))
def multi_margin_and_hinge(m: Any, x: Tensor, i: Tensor) -> Tensor:
    return F.multi_margin_loss(x, i) + (1 - x * x.roll(1, 0).sign().detach()).clamp_min(0).mean()


@program(leaf(64, 256), model=linear(256, 256))
def cummax_and_logcumsumexp(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y.cummax(-1).values.sin() + y.logcumsumexp(-1).tanh()
