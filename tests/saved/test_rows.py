"""What a row of a saved value is in memory: heads of tokens and maps by their operators, else the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.fx.graph import memory_order, sizes_in_memory
from fp8compile.saved.rows import HEADS_IN_TOKENS, row_dims_of
from tests.support.graphs import split_of


def rows_of(model: nn.Module, *args: Tensor) -> dict[tuple[int, ...], int]:
    """By the sizes of each saved value in memory, how many dimensions are a row."""
    split = split_of(model, *args, linears="off", disabled="encode_saved")
    edges = [e for e in split.edges if e.is_tensor and e.forward.meta["val"].is_floating_point()]
    return {sizes_in_memory(e.forward.meta["val"]): row_dims_of(e) for e in edges}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(2, 48, 4, 16).transpose(1, 2) for each in self.qkv)
        return F.scaled_dot_product_attention(q, k, v)


def test_heads_of_a_token_are_one_row() -> None:
    assert rows_of(Attention(), torch.randn(2, 48, 64))[2, 48, 4, 16] == 2


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).transpose(1, 2)
        return h.sigmoid() * h.cumsum(-1)


def test_a_transposed_pair_representation_has_rows_of_channels() -> None:
    split = split_of(Pairs(), torch.randn(2, 24, 32, 16), linears="off", disabled="encode_saved")
    transposed = [e for e in split.edges if e.is_tensor and memory_order(e.forward.meta["val"]) == HEADS_IN_TOKENS]
    assert transposed and all(row_dims_of(edge) == 1 for edge in transposed)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


def test_a_channels_map_is_a_row_and_a_pixel_where_channels_are_last() -> None:
    assert rows_of(Convolutions(), torch.randn(2, 3, 20, 20))[2, 8, 20, 20] == 2
    last = Convolutions().to(memory_format=torch.channels_last)
    found = rows_of(last, torch.randn(2, 3, 20, 20).to(memory_format=torch.channels_last))
    assert found[2, 20, 20, 8] == 1


def test_four_dimensions_alone_are_no_map() -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 8))
    found = rows_of(model, torch.randn(2, 3, 20, 24))
    assert found and set(found.values()) == {1}
