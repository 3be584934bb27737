"""Random numbers: the backward uses the numbers of the forward. Compared under eager's generator (``fallback_random``); the
last ones keep Inductor's own, return their mask, and hold the gradient against that mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, leaf, linear, program, steps


@program(leaf(64, 256), model=linear(256, 256), drive=steps(2))
def dropout_after_gelu(m: Any, x: Tensor) -> Tensor:
    return F.dropout(F.gelu(m(x)), 0.4, True) * x


@program(leaf(64, 256), model=linear(256, 256))
def dropout_of_all_or_nothing(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m(x), 0.0, True).sin() + F.dropout(m(x), 1.0, True)


@program(leaf(8, 64, 8, 8), model=lambda: nn.Sequential(nn.Conv2d(64, 64, 1), nn.Dropout2d(0.5)))
def dropout_of_channels(m: Any, x: Tensor) -> Tensor:
    return m(x).sigmoid() * x


@program(leaf(64, 256), model=lambda: nn.Sequential(nn.Linear(256, 256), nn.AlphaDropout(0.2), nn.SELU()))
def alpha_dropout_and_selu(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(64, 256), model=linear(256, 256))
def a_bernoulli_mask(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return torch.bernoulli(y.detach().sigmoid()) * y.tanh()


@program(leaf(64, 256), model=linear(256, 256))
def randomized_leaky_relu(m: Any, x: Tensor) -> Tensor:
    return F.rrelu(m(x), 0.1, 0.4, training=True) * x


@program(leaf(64, 256), model=linear(256, 512))
def reparameterized_gaussian(m: Any, x: Tensor) -> Tensor:
    mean, log_variance = m(x).chunk(2, -1)
    z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
    return z.sin() * kl[:, None]


@program(leaf(64, 256), model=linear(256, 256))
def noise_scaled_by_the_signal(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return (y + 0.1 * y.abs() * torch.randn_like(y)).tanh()


@program(leaf(64, 256), model=linear(256, 256))
def uniform_noise_through_a_log(m: Any, x: Tensor) -> Tensor:
    u = torch.rand_like(x).clamp_min(1e-6)
    return (m(x) * -torch.log(u)).sigmoid()


UPSTREAM = {"raises": "Inductor 2.13's own pattern for a row index by randperm does not match itself"}


@program(leaf(64, 256), model=linear(256, 256))
def a_random_order_of_rows(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y[torch.rand(64).argsort()].sigmoid() * y


@program(leaf(64, 256), model=linear(256, 256), argued=UPSTREAM)
def a_random_permutation_of_rows(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y[torch.randperm(64)].sigmoid() * y


@program(leaf(64, 256), model=linear(256, 64))
def samples_of_a_categorical(m: Any, x: Tensor) -> Tensor:
    p = m(x).softmax(-1)
    picked = torch.multinomial(p.detach(), 3)
    return p.gather(1, picked).log().mean()


@program(leaf(64, 256), model=linear(256, 256))
def stochastic_depth(m: Any, x: Tensor) -> Tensor:
    keep = (torch.rand(64, 1) < 0.7).float() / 0.7
    return x + keep * F.silu(m(x))


def _mask_agrees(run: Run, model: Any, x: Tensor) -> Values:
    out, mask = run(x)
    out.sum().backward()
    want = torch.autograd.grad((x.sin() * mask).sum(), x)[0]
    error = (x.grad - want).norm() / want.norm()
    assert error < 0.1, f"the gradient is off by {error:.3f} from its own mask's"
    x.grad = None
    return {}


@program(leaf(64, 256), drive=_mask_agrees, bits=False)
def inductors_own_dropout_agrees_with_its_mask(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    mask = F.dropout(torch.ones_like(x), 0.5, True)
    return x.sin() * mask, mask


@program(leaf(64, 256), drive=_mask_agrees, bits=False)
def inductors_own_uniform_noise_agrees_with_itself(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.rand_like(x) * torch.randn_like(x)
    return x.sin() * mask, mask
