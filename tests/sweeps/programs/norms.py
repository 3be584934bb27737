"""Norms: of batches, layers, groups, weights, spectra; by amax, by hand, in chains, with statistics that are updated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.sweeps.registry import Run, Values, leaf, linear, program, projected, steps


def conv_norm(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, bias=False), norm, nn.SiLU())


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.BatchNorm2d(32)), drive=steps(2))
def batch_norm_updates_its_statistics(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.BatchNorm2d(32, momentum=None)), drive=steps(3))
def batch_norm_with_a_cumulative_mean(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.BatchNorm2d(32, track_running_stats=False)))
def batch_norm_without_statistics(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh()


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.BatchNorm2d(32)).eval(), drive=steps(2))
def batch_norm_in_evaluation(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh()


@program(leaf(64, 256), model=lambda: nn.Sequential(nn.Linear(256, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()))
def batch_norm_of_rows_then_relu(m: Any, x: Tensor) -> Tensor:
    return m(x).sigmoid()


class ManualBatchNorm(nn.Module):
    """Batch norm by hand, its running statistics by ``copy_``."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(256, 256)
        self.register_buffer("mean", torch.zeros(256))
        self.register_buffer("var", torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        out = (y - self.mean) * torch.rsqrt(self.var + 1e-5)
        with torch.no_grad():
            self.mean.copy_(0.9 * self.mean + 0.1 * y.mean(0))
            self.var.copy_(0.9 * self.var + 0.1 * y.var(0))
        return out.tanh()


@program(leaf(64, 256), model=ManualBatchNorm, drive=steps(3))
def running_statistics_by_hand(m: Any, x: Tensor) -> Tensor:
    return m(x)


@program(leaf(64, 256), model=lambda: nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.LayerNorm(256)))
def layer_norm_before_and_after(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh() + x


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.GroupNorm(4, 32)))
def group_norm(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.InstanceNorm2d(32, affine=True)))
def instance_norm(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(64, 256), model=linear(256, 256))
def rms_norm_of_rms_norm(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = m(x) + x
    return x.sin()


@program(leaf(64, 256), model=linear(256, 256))
def layer_norm_of_a_nearly_constant_row(m: Any, x: Tensor) -> Tensor:
    return F.layer_norm(5 + 0.02 * m(x), (256,)).tanh()


@program(leaf(64, 256), model=linear(256, 256))
def deviation_by_mean_of_squares(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    deviation = (y.square().mean(-1, keepdim=True) - y.mean(-1, keepdim=True).square() + 1e-6).sqrt()
    return (y / deviation).sin()


@program(leaf(64, 256), model=linear(256, 256))
def norms_of_orders_one_two_three_and_infinity(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return sum((y / y.norm(p, -1, keepdim=True)).sin() for p in (1, 2, 3, float("inf")))


@program(leaf(64, 256), model=linear(256, 256))
def normalize_then_cosine(m: Any, x: Tensor) -> Tensor:
    return F.cosine_similarity(F.normalize(m(x), dim=-1), x, dim=-1)


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(256, 256)), nn.SiLU())


@program(leaf(64, 256), model=weight_norm, drive=steps(2))
def weight_norm_of_a_linear(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(256, 128)), nn.SiLU())


@program(leaf(64, 256), model=spectral_norm, drive=steps(2))
def spectral_norm_of_a_linear(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(64, 256), model=lambda: parametrizations.orthogonal(nn.Linear(64, 64)))
def an_orthogonal_weight(m: Any, x: Tensor) -> Tensor:
    return m(x.view(256, 64)).sin()


@program(leaf(8, 16, 12, 12), model=lambda: nn.Conv2d(16, 32, 3, padding=1))
def weight_standardization(m: Any, x: Tensor) -> Tensor:
    w = m.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.silu(F.conv2d(x, w, m.bias, padding=1))


@program(leaf(8, 16, 12, 12))
def local_response_norm(m: Any, x: Tensor) -> Tensor:
    return F.local_response_norm(x, 5).sin()


def _after_eval(run: Run, model: Any, x: Tensor) -> Values:
    outs = []
    for training in (True, False, True):
        model.train(training)
        outs.append(run(x))
        projected(outs[-1]).backward()
    return {"out": outs}


@program(leaf(8, 16, 12, 12), model=lambda: conv_norm(nn.BatchNorm2d(32)), drive=_after_eval)
def training_evaluation_training(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()
