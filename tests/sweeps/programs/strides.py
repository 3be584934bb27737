"""Layouts: channels last, permuted, expanded, strided, overlapping, negative steps by flip, sizes that no group divides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, data, leaf, linear, program, projected


def conv(last: bool = False) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 16, 3, padding=1))
    return net.to(memory_format=torch.channels_last) if last else net


def _channels_last(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x.to(memory_format=torch.channels_last))
    projected(out.contiguous()).backward()
    return {"out": out, "strides": torch.tensor(out.stride())}


@program(leaf(4, 16, 12, 12), model=lambda: conv(True), drive=_channels_last)
def convolutions_in_channels_last(m: Any, x: Tensor) -> Tensor:
    return m(x).sigmoid() * x


@program(leaf(4, 16, 12, 12), model=conv, drive=_channels_last)
def a_channels_last_input_to_a_contiguous_model(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)) + x.tanh()


@program(leaf(4, 16, 12, 12), model=lambda: nn.Linear(16, 16))
def a_linear_over_channels_by_permutes(m: Any, x: Tensor) -> Tensor:
    y = m(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return F.gelu(y) * x.permute(0, 1, 3, 2)


def _permuted(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x.permute(2, 0, 1), x.permute(1, 2, 0))
    projected(out).backward()
    return {"out": out}


@program(leaf(16, 24, 20), drive=_permuted)
def permuted_inputs(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * b.permute(1, 2, 0).permute(0, 2, 1).reshape(20, 16, 24).sigmoid()


def _expanded(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x.expand(64, 256), x.t().expand(256, 64))
    projected(out).backward()
    return {"out": out}


@program(leaf(1, 256), model=linear(256, 256), drive=_expanded)
def expanded_inputs(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return m(a * torch.arange(64.0)[:, None] / 64).sigmoid() * b.t().tanh()


@program(leaf(1, 256), model=linear(256, 256))
def an_expanded_activation_is_kept(m: Any, x: Tensor) -> Tensor:
    y = m(x).expand(64, 256)
    return y.sigmoid() * torch.linspace(0, 1, 64)[:, None] * y


def _overlapping(run: Run, model: Any, x: Tensor) -> Values:
    out = run(x.unfold(0, 256, 64))
    projected(out).backward()
    return {"out": out}


@program(leaf(4352), model=linear(256, 256), drive=_overlapping)
def overlapping_windows_as_input(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x


@program(leaf(4352))
def overlapping_windows_within(m: Any, x: Tensor) -> Tensor:
    windows = x.sin().unfold(0, 256, 32)
    return windows.tanh() * windows.flip(0)


@program(leaf(8192))
def as_strided_overlapping_reads(m: Any, x: Tensor) -> Tensor:
    y = x.sigmoid()
    return y.as_strided((100, 80), (60, 1)).square() * y.as_strided((100, 80), (1, 60), 7)


@program(leaf(64, 256), model=linear(256, 256))
def every_second_row_and_column(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y[::2, 1::2].sigmoid() * y[1::2, ::2].tanh()


@program(leaf(64, 256), model=linear(256, 256))
def flipped_rolled_and_transposed(m: Any, x: Tensor) -> Tensor:
    y = m(x).tanh()
    return y.flip(0) * y.roll(5, 1) + (y.t() @ y.sigmoid()).sum()


@program(leaf(67, 131), model=lambda: nn.Linear(131, 97))
def sizes_that_no_group_divides(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return F.gelu(y) * y.sigmoid()


@program(leaf(3, 5, 7, 11, 13))
def five_odd_dimensions(m: Any, x: Tensor) -> Tensor:
    y = x.transpose(1, 3).sin()
    return y * y.transpose(0, 4).transpose(0, 4).sigmoid()


@program(leaf(16, 8, 32, 16), drive=lambda run, m, x: _heads(run, x))
def attention_heads_stay_transposed(m: Any, q: Tensor) -> Tensor:
    return (q @ q.transpose(-1, -2) / 4).softmax(-1) @ q.tanh()


def _heads(run: Run, x: Tensor) -> Values:
    out = run(x.transpose(1, 2))
    projected(out).backward()
    return {"out": out}


@program(leaf(2, 8, 16, 16), model=lambda: nn.ConvTranspose2d(8, 12, 4, 2, 1))
def pixel_shuffle_and_transposed_convolution(m: Any, x: Tensor) -> Tensor:
    y = F.silu(m(x))
    return F.pixel_unshuffle(y, 2).tanh() * F.pixel_shuffle(F.pixel_unshuffle(y, 4), 2).sum(1, keepdim=True)


@program(data(2, 3, 32, 32), model=lambda: nn.Conv2d(3, 64, 8, 8))
def patches_are_flattened_and_transposed(m: Any, x: Tensor) -> Tensor:
    tokens = m(x).flatten(2).transpose(1, 2)
    return F.layer_norm(tokens, (64,)).sin() @ tokens.transpose(1, 2)
