"""Stored about statistics: what for, round trips, zeros, views; and where no such storage is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile.analysis.norms import norms_of
from fp8compile.analysis.sensitivity import Unbounded
from fp8compile.numerics import INT8, Groupwise
from fp8compile.numerics.deviations import deviation, from_deviation
from fp8compile.numerics.groups import Groups
from fp8compile.saved.about import ABOUT_BOTH, ABOUT_MEAN, OF_SIZE, About, View, about
from tests.analysis.test_norms import Behind, batch_by_hand, layer_by_hand, rms_by_hand
from tests.support.graphs import split_of


def kind(function: Callable[[Tensor], Tensor], planes: str = "") -> str | None:
    """What the value behind a linear, or a convolution in a memory format, is stored about."""
    x = torch.randn(4, 3, 8, 8) if planes else torch.randn(128, 32)
    x = x.to(memory_format=torch.channels_last) if planes == "last" else x
    torch._dynamo.reset()
    split = split_of(Behind(function, bool(planes)), x, disabled="encode_saved", linears="off")
    [(value, norm)] = list(norms_of(split.fw.graph).items())[:1]
    found = about(norm, value, Groups(128, 2 if planes == "first" else 1))
    return found.name if found else None


def test_what_is_one_number_over_a_row_needs_no_scale() -> None:
    assert kind(rms_by_hand) is None
    assert kind(lambda h: F.layer_norm(h, (64,))) == kind(layer_by_hand) == ABOUT_MEAN
    assert kind(batch_by_hand) == kind(lambda h: F.batch_norm(h, None, None, training=True)) == ABOUT_BOTH
    assert kind(lambda h: h / h.norm(dim=0)) == OF_SIZE


def test_planes_in_either_memory_format() -> None:
    def batch(h: Tensor) -> Tensor:
        return F.batch_norm(h, None, None, training=True)

    assert kind(batch, "first") == ABOUT_MEAN and kind(batch, "last") == ABOUT_BOTH
    assert kind(lambda h: F.group_norm(h, 4), "first") == ABOUT_MEAN
    assert kind(F.instance_norm, "first") == ABOUT_MEAN
    assert kind(lambda h: F.layer_norm(h.permute(0, 2, 3, 1), (32,)), "last") == ABOUT_MEAN


def test_heads_that_share_a_row_have_their_own_size() -> None:
    """Sizes of heads of 8 channels, which lie in rows of 64."""
    heads = kind(lambda h: F.normalize(h.view(-1, 8, 8), dim=-1))
    assert heads == OF_SIZE


def test_no_storage_is_known_for_a_function_of_a_value_by_channels() -> None:
    with pytest.raises(Unbounded, match="normalised in a way that is not known"):
        kind(lambda h: F.relu(h) / h.abs().sum(0))


def test_a_deviation_comes_back() -> None:
    x = torch.randn(512, 64) * torch.logspace(-4, 2, 64) + torch.logspace(2, -2, 64)
    mean, rstd = x.mean(0), (x.var(0) + 1e-12).rsqrt()
    for given in ((mean, rstd, False), (mean, 1 / rstd, True), (mean, None, False), (None, rstd, False)):
        back = from_deviation(deviation(x, *given), *given)
        assert (
            (back - x).abs().le(4 * 2.0**-24 * (x.abs() + mean.abs())).all()
        )  # two roundings of each of two numbers


def test_errors_are_shares_of_the_deviation() -> None:
    """Channels of any mean and any deviation in one group: INT8's half step, of each channel's own deviation."""
    x = (torch.randn(512, 64, dtype=torch.float64) * torch.logspace(-4, 2, 64) + 100).float()
    mean, rstd = x.mean(0), x.var(0).rsqrt()
    z = deviation(x, mean, rstd, False)
    codec = Groupwise(INT8, 64)
    back = from_deviation(codec.decode(*codec.encode(z), torch.float32), mean, rstd, False)
    step = z.abs().amax(1, keepdim=True) / 127 * (1 + 2.0**-8)
    assert ((back - x).abs() * rstd <= step / 2 + 2.0**-22 * 100 * rstd).all()


def test_without_any_spread_the_mean_comes_back_exactly() -> None:
    x = torch.full((64, 32), 3.7)
    mean, rstd = x.mean(0), torch.full((32,), 1e-5).rsqrt()
    x = mean.expand(64, 32).contiguous()
    codec = Groupwise(INT8, 32)
    z = codec.decode(*codec.encode(deviation(x, mean, rstd, False)), torch.float32)
    assert torch.equal(from_deviation(z, mean, rstd, False) - mean, torch.zeros(64, 32))


def test_views_lead_there_and_back() -> None:
    x = torch.randn(2, 3, 4, 5)
    views = (View((2, 3, 4, 5), (2, 4, 5, 3), (0, 2, 3, 1)), View((2, 4, 5, 3), (2, 20, 3)))
    made = About(None, None, False, views)
    assert made._viewed(x).shape == (2, 20, 3) and torch.equal(made._back(made._viewed(x)), x)
    assert torch.equal(made._viewed(x), x.permute(0, 2, 3, 1).reshape(2, 20, 3))
