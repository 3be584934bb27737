"""What was seen to go wrong before (gradients of NaN, of -18 dB, of 12 dB): each stays right at 25 dB."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import data, leaf, linear, program, unit

ROWS = (64, 256)


@program(leaf(*ROWS), bar=25)
def divide_by_abs_max(m: Any, h: Tensor) -> Tensor:
    return (h / h.abs().amax(-1, keepdim=True)).sin().sum()


@program(leaf(*ROWS), bar=25)
def divide_by_global_abs_max(m: Any, h: Tensor) -> Tensor:
    return (h / h.abs().max()).sin().sum()


@program(leaf(*ROWS), bar=25)
def normalize_by_the_infinity_norm(m: Any, h: Tensor) -> Tensor:
    return F.normalize(h, p=float("inf")).sin().sum()


@program(leaf(*ROWS), bar=25)
def square_then_amax(m: Any, h: Tensor) -> Tensor:
    return h.square().amax(-1).sin().sum()


@program(
    leaf(*ROWS), bar=25, model=lambda: nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))
)
def relu_then_amax_behind_batch_norm(m: Any, h: Tensor) -> Tensor:
    return F.relu(m(h.view(64, 1, 16, 16))).amax((2, 3)).square().mean()


@program(leaf(*ROWS), bar=25, model=linear(256, 256))
def scatter_amax_of_gathered_rows(m: Any, h: Tensor) -> Tensor:
    to = (torch.arange(128) % 8)[:, None].expand(128, 256)
    rows = m(h)[torch.arange(128) // 2]
    return torch.zeros(8, 256).scatter_reduce(0, to, rows, "amax", include_self=False).square().mean()


@program(data(*ROWS), bar=25, model=linear(256, 256))
def input_changed_in_place(m: Any, x: Tensor) -> Tensor:
    return m(x.sub_(0.5).div_(0.25)).relu().square().mean()


@program(data(*ROWS), bar=25, model=linear(256, 256, 16))
def input_changed_in_place_two_layers(m: Any, x: Tensor) -> Tensor:
    return m(x.mul_(3).add_(1)).square().mean()


@program(unit(*ROWS), bar=25)
def log1p_of_minus_p(m: Any, p: Tensor) -> Tensor:
    return torch.log1p(-p).mean()


@program(unit(*ROWS), bar=25)
def atanh(m: Any, p: Tensor) -> Tensor:
    return torch.atanh(p).square().mean()


@program(unit(*ROWS), bar=25)
def one_over_a_constant_minus_x(m: Any, p: Tensor) -> Tensor:
    return (1 / (1.001 - p)).mean()


@program(unit(*ROWS), bar=25)
def binary_cross_entropy_of_probabilities(m: Any, p: Tensor) -> Tensor:
    return F.binary_cross_entropy(p, (p.detach() > 0.7).float())


@program(leaf(*ROWS), bar=25, model=linear(256, 256))
def sin_of_thirty_z(m: Any, x: Tensor) -> Tensor:
    return torch.sin(30 * m(x)).square().mean()


class Codebook(nn.Module):
    """The forward reads a buffer, then overwrites it (the codebook of a VQ-VAE, a running mean)."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Linear(256, 64), nn.Linear(64, 256)
        self.register_buffer("cb", torch.randn(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.e(x)
        q = self.cb[torch.cdist(z, self.cb).argmin(1)]
        with torch.no_grad():
            self.cb.copy_(self.cb * 0.5 + torch.randn(1, 64) * 0 + z.mean(0) * 0.5)
        return (self.d(F.gelu(z + (q - z).detach())) - x).square().mean()


@program(data(*ROWS), bar=25, model=Codebook)
def buffer_overwritten_in_the_forward(m: Any, x: Tensor) -> Tensor:
    return m(x)
