"""encode_saved: values that a norm centres with given statistics, as BatchNorm in evaluation does, are stored about these."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.saved.about import ABOUT_BOTH, ABOUT_MEAN
from fp8compile.saved.judge import NOT_KEPT
from tests.support.measure import compiled, kept_bytes
from tests.support.reference import sqnr_db


def frozen(std: float) -> nn.Module:
    """Channels whose mean is 10, and ``std`` times a linear's result; the running statistics say so."""
    torch.manual_seed(0)
    linear, norm = nn.Linear(64, 128), nn.BatchNorm1d(128)
    linear.bias.data.fill_(10.0)
    of_data = linear(std * torch.randn(4096, 64)).detach()
    norm.running_mean, norm.running_var = of_data.mean(0), of_data.var(0)
    return nn.Sequential(linear, norm.eval(), nn.GELU(), nn.Linear(128, 64))


def worst(std: float, make_fn: Callable[[nn.Module], Callable[[Tensor], Tensor]], autocast: bool = False) -> float:
    """The worst gradient in dB beside float64."""
    model = frozen(std)
    exact = copy.deepcopy(model).double()
    torch.manual_seed(1)
    x, goal = std * torch.randn(256, 64), torch.randn(256, 64)
    (exact(x.double()) - goal).square().mean().backward()
    torch._dynamo.reset()
    fn = make_fn(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fn(x)
    (out.float() - goal).square().mean().backward()
    pairs = zip(exact.parameters(), model.parameters(), strict=True)
    return min(sqnr_db(q.grad, p.grad) for q, p in pairs if q.grad is not None and p.grad is not None)


@pytest.mark.parametrize("std", [1.0, 0.3, 0.1, 0.01])
def test_gradients_are_not_below_those_of_bf16(std: float) -> None:
    """With codes of the values themselves 30.5, 20.9, 11.2 and -5.9 dB in FP32, and up to 7 below BF16 under autocast."""
    of_bf16 = worst(std, lambda model: model, autocast=True)
    for codegen in ("eager", "inductor"):
        ours = worst(std, lambda m, c=codegen: compiled(m, linears="off", **{"debug.codegen": c}), autocast=True)  # type: ignore[misc]
        assert ours > of_bf16 - 3
    assert worst(std, lambda model: compiled(model, linears="off")) > 40, (
        "INT8's own 44 dB of Gaussian values, for all"
    )


def convolutions(channels_last: bool) -> nn.Module:
    made = nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32).eval(), nn.ReLU(), nn.Conv2d(32, 8, 3))
    return made.to(memory_format=torch.channels_last) if channels_last else made


@pytest.mark.parametrize("channels_last", [False, True])
def test_maps_are_stored_about_the_statistics_of_their_channel(channels_last: bool) -> None:
    torch._dynamo.reset()
    model, x = convolutions(channels_last), torch.randn(4, 3, 20, 20)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    kept = kept_bytes(model, fn, (x,))
    report = fp8compile.report(fn)
    [entry] = report.saved
    assert (ABOUT_BOTH if channels_last else f"({ABOUT_MEAN})") in entry.codec
    assert kept == entry.bytes_after, "statistics are the model's, and what is made of them is made again"


class ByHand(nn.Module):
    """A running mean that the forward overwrites, or not."""

    def __init__(self, updates: bool) -> None:
        super().__init__()
        self.a, self.b, self.updates = nn.Linear(64, 128), nn.Linear(128, 64), updates
        self.register_buffer("mean", torch.full((128,), 10.0))
        self.register_buffer("variance", torch.ones(128))
        self.a.bias.data.fill_(10.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(torch.sin((h - self.mean) * torch.rsqrt(self.variance + 1e-5)))
        if self.updates:
            self.mean.lerp_(h.detach().mean(0), 0.5)
        return out


@pytest.mark.parametrize("updates", [False, True])
def test_statistics_that_the_forward_overwrites_are_none_to_store_about(updates: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ByHand(updates)
    exact, x = copy.deepcopy(model), torch.randn(256, 64)
    exact(x).square().mean().backward()
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    fn(x).square().mean().backward()
    assert exact.a.weight.grad is not None and model.a.weight.grad is not None
    assert sqnr_db(exact.a.weight.grad, model.a.weight.grad) > 30
    report = fp8compile.report(fn)
    assert (NOT_KEPT in {s.reason for s in report.skips}) == updates


@pytest.mark.parametrize("scale", [
    lambda v: v,  # may be zero
    lambda v: torch.rsqrt(v + 1).expand(256, 128),  # as large as what it scales
])  # fmt: skip
def test_what_is_no_inverse_of_a_channel_is_none_to_store_about(scale: Callable[[Tensor], Tensor]) -> None:
    class Masked(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.sin((self.a(x) - self.mean) * scale(self.variance)))

    torch._dynamo.reset()
    model = Masked(False)
    model.variance.data[::2] = 0
    fn = compiled(model, linears="off", **{"saved.min_numel": 0})
    fn(torch.randn(256, 64)).square().mean().backward()
    assert model.a.weight.grad is not None and model.a.weight.grad.isfinite().all()
    assert not any(ABOUT_MEAN in s.codec for s in fp8compile.report(fn).saved)
