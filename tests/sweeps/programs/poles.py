"""Poles away from zero and at it: what is kept must not land on the other side of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sweeps.registry import data, index, leaf, linear, program, unit


@program(leaf(64, 256), model=linear(256, 256))
def logit_of_a_sigmoid_by_hand(m: Any, x: Tensor) -> Tensor:
    p = (6 * m(x)).sigmoid()
    return torch.log(p / (1 - p)).sin()


@program(leaf(64, 256), model=linear(256, 256))
def cross_entropy_of_a_sigmoid_by_hand(m: Any, x: Tensor) -> Tensor:
    p, t = (8 * m(x)).sigmoid(), (x.detach() > 0).float()
    return -(t * torch.log(p + 1e-7) + (1 - t) * torch.log(1 - p + 1e-7)).mean()


@program(leaf(64, 256), model=linear(256, 256))
def focal_loss(m: Any, x: Tensor) -> Tensor:
    p = (4 * m(x)).sigmoid()
    return (-((1 - p) ** 2) * torch.log(p.clamp_min(1e-6))).mean()


@program(unit(64, 256))
def logit(m: Any, p: Tensor) -> Tensor:
    return torch.logit(p).tanh()


@program(unit(64, 256))
def logit_with_eps(m: Any, p: Tensor) -> Tensor:
    return torch.logit(p, eps=1e-3).square()


@program(unit(64, 256))
def acos_and_asin(m: Any, p: Tensor) -> Tensor:
    return torch.acos(p).sin() + torch.asin(2 * p - 1)


@program(leaf(64, 32), leaf(64, 32))
def the_angle_between_vectors(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.acos(F.cosine_similarity(a, b, dim=-1).clamp(-0.999, 0.999))


@program(unit(64, 256))
def acosh_near_one(m: Any, p: Tensor) -> Tensor:
    return torch.acosh(1 + p)


@program(unit(64, 256))
def tan_near_its_pole(m: Any, p: Tensor) -> Tensor:
    return torch.tan(1.55 * p).tanh()


@program(unit(64, 256, low=1e-3))
def rsqrt_near_zero(m: Any, p: Tensor) -> Tensor:
    return torch.rsqrt(p)


@program(leaf(64, 256), model=linear(256, 256))
def a_quotient_of_two_projections(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return (x / (y.abs() + 1e-3)).tanh()


@program(unit(64, 256), unit(64, 256))
def reciprocal_of_a_difference(m: Any, p: Tensor, q: Tensor) -> Tensor:
    return 1 / (p - q + 1.01)


@program(unit(64, 256))
def a_square_root_at_its_end(m: Any, p: Tensor) -> Tensor:
    return torch.sqrt(1 - p * p)


@program(leaf(64, 3), leaf(80, 3))
def distances_by_root_of_squares(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return ((a[:, None] - b[None]).square().sum(-1) + 1e-8).sqrt().sin()


@program(leaf(64, 3), leaf(80, 3))
def inverse_square_forces(m: Any, a: Tensor, b: Tensor) -> Tensor:
    difference = a[:, None] - b[None]
    return (difference / ((difference * difference).sum(-1, keepdim=True) + 0.01) ** 1.5).tanh()


@program(leaf(64, 64), leaf(96, 64))
def cdist(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b).sin()


@program(leaf(64, 256), model=linear(256, 256))
def poisson_and_gaussian_likelihood(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    variance = F.softplus(4 * y) + 1e-4
    return F.gaussian_nll_loss(y, x.detach(), variance) + F.poisson_nll_loss(y, x.detach().abs())


@program(leaf(64, 256), model=linear(256, 256))
def kl_divergence_of_two_softmaxes(m: Any, x: Tensor) -> Tensor:
    p, q = m(x).softmax(-1), x.softmax(-1)
    return (p * (p / q).log()).sum()


@program(unit(64, 256), unit(64, 256))
def beta_function_and_digamma(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


@program(unit(64, 256))
def erfinv(m: Any, p: Tensor) -> Tensor:
    return torch.erfinv(2 * p - 1).sin()


@program(leaf(64, 256), index(256, 64))
def cross_entropy_with_smoothing_and_ignored_rows(m: Any, x: Tensor, i: Tensor) -> Tensor:
    return F.cross_entropy(5 * x, torch.where(i % 7 == 0, -100, i), label_smoothing=0.1)


@program(leaf(64, 256), index(256, 64))
def cross_entropy_of_probabilities_by_hand(m: Any, x: Tensor, i: Tensor) -> Tensor:
    p = (5 * x).softmax(-1)
    return -p.gather(1, i[:, None]).log().mean()


@program(leaf(64, 256), data(64, 256))
def binary_cross_entropy_with_logits(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(8 * x, y.sigmoid(), pos_weight=torch.tensor(3.0))


@program(leaf(64, 256), leaf(64, 256))
def contrastive_loss_with_a_temperature(m: Any, a: Tensor, b: Tensor) -> Tensor:
    similarity = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() / 0.07
    return F.cross_entropy(similarity, torch.arange(64))
