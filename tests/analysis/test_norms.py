"""norms_of: what a forward normalises, in which form; and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.analysis.norms import Norm, norms_of
from tests.support.graphs import split_of

Function = Callable[[Tensor], Tensor]


class Behind(nn.Module):
    """A function of a linear's result, or a convolution's."""

    def __init__(self, function: Function, planes: bool = False) -> None:
        super().__init__()
        self.made = nn.Conv2d(3, 32, 3, padding=1) if planes else nn.Linear(32, 64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.made(x))


def found(function: Function, planes: bool = False) -> list[Norm]:
    x = torch.randn(4, 3, 8, 8) if planes else torch.randn(128, 32)
    split = split_of(Behind(function, planes), x, disabled="encode_saved", linears="off")
    return list(norms_of(split.fw.graph).values())


def layer_by_hand(h: Tensor) -> Tensor:
    mean = h.mean(-1, keepdim=True)
    return (h - mean) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)


def layer_by_std(h: Tensor) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6)


def batch_by_hand(h: Tensor) -> Tensor:
    d = h - h.mean(0)
    return d * torch.rsqrt((d * d).mean(0) + 1e-5)


def rms_by_hand(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("function", [
    lambda h: F.layer_norm(h, (64,)),
    lambda h: F.batch_norm(h, None, None, training=True),
    layer_by_hand,
    layer_by_std,
    batch_by_hand,
])  # fmt: skip
def test_a_norm_with_a_mean(function: Function) -> None:
    norm = found(function)[0]
    assert norm.is_known and norm.is_direct and norm.mean is not None and norm.scale is not None


@pytest.mark.parametrize("function", [
    lambda h: F.batch_norm(h, None, None, training=True),
    lambda h: F.group_norm(h, 4),
    lambda h: F.instance_norm(h),
    lambda h: F.layer_norm(h.permute(0, 2, 3, 1), (32,)),
])  # fmt: skip
def test_a_norm_of_planes(function: Function) -> None:
    [norm] = found(function, planes=True)
    assert norm.is_known and norm.mean is not None and norm.scale is not None and norm.seen is not None


@pytest.mark.parametrize("function", [
    rms_by_hand,
    lambda h: F.rms_norm(h, (64,)),
    lambda h: F.normalize(h, dim=-1),
    lambda h: h / h.norm(dim=-1, keepdim=True),
    lambda h: h / h.abs().sum(-1, keepdim=True),
])  # fmt: skip
def test_a_norm_without_a_mean(function: Function) -> None:
    [norm] = found(function)
    assert norm.is_known and norm.is_direct and norm.mean is None and norm.scale is not None


def test_the_value_is_found_where_the_norm_reads_it() -> None:
    gain = torch.linspace(1, 100, 64)
    split = split_of(Behind(lambda h: rms_by_hand(h * gain)), torch.randn(128, 32), disabled="encode_saved")
    [value] = norms_of(split.fw.graph)
    assert value.target is torch.ops.aten.mul.Tensor and value.all_input_nodes[0].target is not value.target


def test_what_is_done_with_a_mean_besides_is_not_known() -> None:
    for function in (
        lambda h: h * 2 - h.mean(-1, keepdim=True),
        lambda h: F.gelu(h) - h.mean(-1, keepdim=True),
        lambda h: (h - h.mean(0)) + (h - h.mean(-1, keepdim=True)),
    ):
        torch._dynamo.reset()
        assert not all(norm.is_known for norm in found(function))


def test_a_function_of_the_value_that_is_divided_is_said() -> None:
    [norm] = found(lambda h: F.relu(h) / h.abs().sum(-1, keepdim=True))
    assert norm.is_known and not norm.is_direct


@pytest.mark.parametrize("function", [
    lambda h: F.softmax(h, -1),
    lambda h: h.exp() / h.exp().sum(-1, keepdim=True),
    lambda h: F.log_softmax(h, -1),
    lambda h: F.gelu(h),
    lambda h: h + h.mean(-1, keepdim=True),
    lambda h: h * torch.sigmoid(h.mean(-1, keepdim=True)),
    lambda h: h * (h.norm(dim=0) / h.norm(dim=0).mean()),
    lambda h: (h - 1.0) * 2.0,
])  # fmt: skip
def test_no_norm(function: Function) -> None:
    """A softmax's terms have errors of their own size; a gain by a statistic leaves what is small small."""
    assert found(function) == []
