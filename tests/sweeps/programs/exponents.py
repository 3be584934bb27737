"""Large phases, chains of exp and log, powers: where a small relative error of what is kept becomes a large one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Maker, data, leaf, linear, program, unit


@program(leaf(64, 256), model=linear(256, 256, act=None))
def fourier_features(m: Any, x: Tensor) -> Tensor:
    phase = 2 * torch.pi * 5 * m(x)
    return torch.cat([phase.sin(), phase.cos()], -1)


@program(leaf(64, 3), model=linear(60, 256, 64))
def positional_encoding_of_coordinates(m: Any, x: Tensor) -> Tensor:
    phase = x[..., None] * (2.0 ** torch.arange(10))
    return m(torch.cat([phase.sin(), phase.cos()], -1).flatten(1)).sigmoid()


class Siren(nn.Module):
    """Sines of thirty times a projection, twice (implicit representations)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 256), nn.Linear(256, 256), nn.Linear(256, 16)
        nn.init.uniform_(self.b.weight, -((6 / 256) ** 0.5) / 30, (6 / 256) ** 0.5 / 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.sin(30 * self.b(torch.sin(30 * self.a(x)))))


@program(lambda: torch.rand(256, 2).requires_grad_(), model=Siren)
def a_siren(m: Any, x: Tensor) -> Tensor:
    return m(x).square()


@program(leaf(4, 64, 4, 16), lambda: torch.arange(64.0).requires_grad_())
def rotary_angles_of_learned_positions(m: Any, x: Tensor, position: Tensor) -> Tensor:
    angle = position[:, None] * 10000 ** (-torch.arange(8) / 8)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).sigmoid()


@program(leaf(64, 256), model=linear(256, 256))
def time_embedding_of_a_diffusion_model(m: Any, x: Tensor) -> Tensor:
    t = 1000 * x[:, :1].sigmoid()
    phase = t * torch.exp(-torch.linspace(0, 9, 128))
    return F.silu(m(torch.cat([phase.sin(), phase.cos()], -1)))


@program(leaf(64, 256), model=linear(256, 256))
def softmax_by_hand_with_max(m: Any, x: Tensor) -> Tensor:
    y = 4 * m(x)
    e = (y - y.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) * x


@program(leaf(64, 256), model=linear(256, 256))
def softmax_by_hand_without_max(m: Any, x: Tensor) -> Tensor:
    e = (4 * m(x)).exp()
    return e / e.sum(-1, keepdim=True) * x


@program(leaf(64, 256), model=linear(256, 256))
def logsumexp_by_hand(m: Any, x: Tensor) -> Tensor:
    y = 10 * m(x)
    top = y.amax(-1, keepdim=True)
    return (top + (y - top).exp().sum(-1, keepdim=True).log()).sin() * x


@program(leaf(64, 256), model=linear(256, 256))
def logsumexp_with_a_temperature(m: Any, x: Tensor) -> Tensor:
    return 0.05 * (m(x) / 0.05).logsumexp(-1).sin()


@program(leaf(64, 256), model=linear(256, 256))
def exp_of_exp(m: Any, x: Tensor) -> Tensor:
    return m(x).exp().exp().log1p()


@program(leaf(64, 256), model=linear(256, 256))
def exp_of_a_large_negative(m: Any, x: Tensor) -> Tensor:
    return torch.exp(-50 * m(x).square())


@program(leaf(64, 256), model=linear(256, 256))
def hyperbolic_sine_and_cosine(m: Any, x: Tensor) -> Tensor:
    y = 5 * m(x)
    return y.sinh() * 1e-2 + torch.log(y.cosh())


@program(unit(64, 256), leaf(64, 256))
def powers_with_a_tensor_exponent(m: Any, p: Tensor, x: Tensor) -> Tensor:
    return p ** (2 + x.tanh())


@program(leaf(64, 256), model=linear(256, 256))
def high_and_negative_powers(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y.pow(5) + (1 + y.square()).pow(-0.5) + (1.5 + y.tanh()).pow(-7)


@program(unit(64, 256))
def entropy_by_xlogy(m: Any, p: Tensor) -> Tensor:
    return -torch.xlogy(p, p) - torch.special.xlog1py(1 - p, -p)


@program(leaf(64, 256), leaf(64, 256))
def logaddexp_chain(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.logaddexp(10 * a, torch.logaddexp(10 * b, a * b)).sin()


@program(leaf(64, 256), model=linear(256, 256))
def softplus_then_log(m: Any, x: Tensor) -> Tensor:
    return F.softplus(10 * m(x)).log().tanh()


def decades(*shape: int) -> Maker:
    """Positive numbers over six decades, which take a gradient: both factors are kept then."""
    return lambda: (10 ** (6 * torch.rand(shape) - 3)).requires_grad_()


@program(leaf(64, 256), decades(64, 256))
def tanh_of_a_product_with_factors_over_decades(m: Any, x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w)


@program(leaf(64, 256), decades(64, 256))
def sigmoid_of_a_quotient_by_divisors_over_decades(m: Any, x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x / w)


@program(leaf(64, 256), decades(256))
def tanh_of_columns_scaled_over_decades(m: Any, x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w)


@program(data(64, 256), model=linear(256, 256))
def a_wave_equation_phase(m: Any, x: Tensor) -> Tensor:
    return torch.cos(200 * x + 20 * m(x)) * x


@program(leaf(64, 256), model=linear(256, 256))
def bessel_and_error_functions(m: Any, x: Tensor) -> Tensor:
    y = 3 * m(x)
    return torch.special.i0e(y) + torch.erf(y) * torch.special.ndtr(x) + torch.sinc(y)
