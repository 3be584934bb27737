"""Higher-order operators: cond, while_loop, scan, map, nested compile regions, flex attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from tests.sweeps.registry import data, leaf, linear, program


@program(leaf(64, 256), model=linear(256, 256))
def cond_on_the_data(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return torch.cond(y.sum() > 0, lambda a, b: a.sin() * b, lambda a, b: a.tanh() + b.sigmoid(), (y, x))


@program(leaf(64, 256), model=linear(256, 256))
def cond_with_a_linear_in_a_branch(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e9, lambda a: a * 1.0, lambda a: F.gelu(m(a)).sin(), (x,))


@program(data(64, 256), model=linear(256, 256))
def a_while_loop_before_the_model(m: Any, x: Tensor) -> Tensor:
    _, start = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.5), (torch.tensor(0), x))
    return m(start).sigmoid() * start


@program(leaf(16, 32, 64), model=linear(64, 64))
def a_scan_with_weights(m: Any, x: Tensor) -> Tensor:
    w = m[0].weight

    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(h @ w + row)
        return new, new * row.sigmoid()

    last, outs = scan(step, torch.zeros(32, 64), x)
    return outs * last


@program(leaf(16, 1024))
def an_associative_scan_of_sums(m: Any, x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a + b, x.sin(), 0, combine_mode="generic").sigmoid()


@program(leaf(8, 32, 256), model=linear(256, 256))
def a_map_over_the_batch(m: Any, x: Tensor) -> Tensor:
    w = m[0].weight
    return torch_map(lambda row, weight: F.silu(row @ weight) * row, x, w)


class Block(nn.Module):
    """A block compiled once and called often."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(256), nn.Linear(256, 256)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.proj(self.norm(x)))


@program(leaf(64, 256), model=lambda: nn.Sequential(Block(), Block(), Block()))
def nested_compile_regions(m: Any, x: Tensor) -> Tensor:
    return m(x).sin()


@program(leaf(64, 256), model=Block)
def one_nested_compile_region(m: Any, x: Tensor) -> Tensor:
    return m(x).tanh()


@program(leaf(64, 256), model=linear(256, 256))
def a_nested_region_with_amax(m: Any, x: Tensor) -> Tensor:
    @torch.compiler.nested_compile_region
    def scaled(y: Tensor) -> Tensor:
        return y / y.abs().amax(-1, keepdim=True)

    return (scaled(m(x)) * scaled(x)).sin()


@program(data(2, 4, 128, 16), data(2, 4, 128, 16), model=linear(16, 16))
def flex_attention_of_data_before_the_model(m: Any, q: Tensor, k: Tensor) -> Tensor:
    # PyTorch has no backward of it on a CPU.
    return m(flex_attention(q, k, k, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j))).sin()


@program(leaf(64, 256), model=linear(256, 256))
def vmap_over_a_linear_by_cond_free_code(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.silu(m(row)) / (1.5 - row.tanh()))(x)
