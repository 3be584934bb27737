"""Indices, computed and given: gather, scatter, index_put, bucketize, interpolation, sampling of grids, one-hot products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import index, leaf, linear, program


@program(leaf(64, 256), index(64, 128), model=linear(256, 256))
def scatter_reduce_amax(m: Any, x: Tensor, i: Tensor) -> Tensor:
    y = m(x)[i]
    start = torch.zeros(64, 256)
    return start.scatter_reduce(0, i[:, None].expand_as(y), y, "amax", include_self=False).sin()


@program(leaf(64, 256), index(64, 128), model=linear(256, 256))
def scatter_reduce_prod_and_mean(m: Any, x: Tensor, i: Tensor) -> Tensor:
    y, start = m(x)[i].exp(), torch.ones(64, 256)
    to = i[:, None].expand_as(y)
    return start.scatter_reduce(0, to, y, "prod").log() + start.scatter_reduce(0, to, y.sin(), "mean")


@program(leaf(64, 256), index(64, 40), model=linear(256, 256))
def index_put_accumulates(m: Any, x: Tensor, i: Tensor) -> Tensor:
    return x.sin().index_put((i,), m(x)[:40], accumulate=True).sigmoid()


@program(leaf(64, 256), model=linear(256, 256))
def index_put_overwrites(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    z = y.sin()
    z[torch.arange(0, 64, 3)] = x[:22].tanh()
    return z * y


@program(leaf(64, 256), model=linear(256, 256))
def gather_by_argmax(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return x.gather(1, y.argmax(-1, keepdim=True)).sin() * y.gather(1, x.argmin(-1, keepdim=True))


@program(leaf(64, 256), model=linear(256, 256))
def gather_by_argsort(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return y.gather(1, y.detach().argsort(-1)).sigmoid() * x


@program(leaf(64, 256), model=linear(256, 256))
def buckets_choose_a_table_row(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    table = torch.linspace(0.5, 2, 9)
    return y.tanh() * table[torch.bucketize(y.detach(), torch.linspace(-1, 1, 8))]


@program(leaf(64, 256), leaf(33))
def a_piecewise_linear_function(m: Any, x: Tensor, knots: Tensor) -> Tensor:
    at = (x.sigmoid() * 32).clamp(0, 31.999)
    low = at.floor().long()
    part = at - low
    return knots[low] * (1 - part) + knots[low + 1] * part


@program(leaf(4, 8, 16, 16), leaf(4, 16, 16, 2, scale=0.6))
def grid_sample(m: Any, x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x.sin(), grid, align_corners=False, padding_mode="border").tanh()


@program(leaf(4, 8, 16, 16), leaf(4, 16, 16, 2, scale=0.6))
def grid_sample_of_a_conv_at_reflected_points(m: Any, x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid.tanh(), align_corners=True, padding_mode="reflection").sin()


@program(leaf(4, 8, 12, 12))
def interpolation_up_and_down(m: Any, x: Tensor) -> Tensor:
    y = F.interpolate(x.sin(), scale_factor=2, mode="bilinear")
    return F.interpolate(y.sigmoid(), size=(9, 7), mode="bicubic") + F.interpolate(y, size=(9, 7)).tanh()


@program(index(512, 64, 16), model=lambda: nn.Embedding(512, 64, padding_idx=3, max_norm=None))
def an_embedding_with_padding(m: Any, i: Tensor) -> Tensor:
    return m(i).sin() * m(i.flip(0)).sigmoid()


@program(index(512, 1024), model=lambda: nn.EmbeddingBag(512, 64, mode="max"))
def an_embedding_bag_of_maxima(m: Any, i: Tensor) -> Tensor:
    return m(i.view(128, 8)).sin()


@program(leaf(64, 256), model=linear(256, 256))
def one_hot_products(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    hot = F.one_hot(y.argmax(-1), 256).float()
    return (hot * y.softmax(-1)).sum(-1).log() + hot @ x.t().sin().sum(-1)


@program(leaf(64, 256), model=linear(256, 256))
def masked_fill_select_and_scatter(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    mask = torch.arange(64 * 256).view(64, 256) % 3 == 0
    return y.masked_fill(mask, -2.0).exp() + y.masked_scatter(mask, x.tanh()).sin()


@program(leaf(64, 256), model=linear(256, 256))
def triangles_and_diagonals(m: Any, x: Tensor) -> Tensor:
    y = m(x) @ x.t()
    return y.tril().tanh() + torch.diag_embed(y.diagonal().sin()) + y.triu(1).sigmoid()


@program(leaf(16, 64, 16))
def segment_means_by_cumulative_sums(m: Any, x: Tensor) -> Tensor:
    total = x.sigmoid().cumsum(1)
    return (total[:, 8:] - total[:, :-8]).div(8).log()


@program(leaf(64, 64))
def cumulative_products(m: Any, x: Tensor) -> Tensor:
    return (1 - 0.1 * x.sigmoid()).cumprod(-1) * x
