"""encode_saved: values that norms read have an error beside their own deviation, whatever their mean and their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.saved.about import ABOUT_BOTH, ABOUT_MEAN
from tests.support.measure import compiled
from tests.support.reference import sqnr_db

Make = Callable[[], nn.Module]
SPREADS = (1.0, 0.3, 0.1, 0.01)


def linears(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128, bias=False), norm, nn.GELU(), nn.Linear(128, 64))


def convolutions(channels_last: bool) -> nn.Module:
    def block(i: int) -> list[nn.Module]:
        return [nn.Conv2d(i, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]

    made = nn.Sequential(*block(3), *block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16))
    return made.to(memory_format=torch.channels_last) if channels_last else made


def gradients(
    make: Make, loss: Callable[[nn.Module], Tensor], wide: bool = False, **options: object
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make().double() if wide else make()
    torch._dynamo.reset()
    fn = compiled(model, linears="off", **options) if options else model
    loss(fn).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(make: Make, loss: Callable[[nn.Module], Tensor], autocast: bool = False, **options: object) -> float:
    """The worst gradient beside exact ones; of those that are not zero by construction."""

    def run(fn: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(fn)

    exact = gradients(make, lambda fn: loss(lambda x: fn(x.double())), wide=True)  # type: ignore[arg-type]
    found = gradients(make, run, **options)
    least = 1e-6 * max(float(g.norm()) for g in exact.values())
    return min(sqnr_db(exact[n], found[n]) for n in exact if exact[n].norm() > least)


def spread(std: float) -> Callable[[nn.Module], Tensor]:
    def loss(fn: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(1, 64, generator=generator) + std * torch.randn(256, 64, generator=generator)
        out = fn(x)
        out = out if out.dtype is torch.float64 else out.float()
        return (out - torch.randn(256, 64, generator=generator)).square().mean()

    return loss


@pytest.mark.parametrize("std", SPREADS)
def test_a_batch_norm_of_channels_that_vary_less_than_their_mean(std: float) -> None:
    """At least what BF16 autocast has, less 3 dB. With one scale for 128 channels: 42.0, 30.8, 14.6 and -22.3 dB."""

    def make() -> nn.Module:
        return linears(nn.BatchNorm1d(128))

    of_bf16 = worst(make, spread(std), autocast=True)
    assert worst(make, spread(std), **{"debug.codegen": "eager"}) > of_bf16 - 3
    assert worst(make, spread(std), autocast=True, **{"debug.codegen": "inductor"}) > of_bf16 - 3


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_network_of_convolutions(channels_last: bool) -> None:
    """Not below BF16, whose own masks differ: 14.8 dB with scales across channels and masks from codes."""

    def make() -> nn.Module:
        return convolutions(channels_last)

    def loss(fn: nn.Module) -> Tensor:
        x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        out = fn(x)
        return (out if out.dtype is torch.float64 else out.float()).square().mean()

    assert worst(make, loss, **{"debug.codegen": "eager"}) > worst(make, loss, autocast=True)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda h: F.layer_norm(h, (128,)),
    "layer by hand": lambda h: (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6),
    "group": lambda h: F.group_norm(h, 4),
    "batch by hand": lambda h: (h - h.mean(0)) * (h.var(0, unbiased=False) + 1e-5).rsqrt(),
    "instance": lambda h: F.instance_norm(h.unsqueeze(1)).squeeze(1),
}


class Shifted(nn.Module):
    """A linear's result far away from zero, normalised."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(64, 128), nn.Linear(128, 64), function
        self.a.bias.data.fill_(100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize("name", NORMS)
def test_values_a_hundred_deviations_away_from_zero(name: str) -> None:
    """INT8's step would be a deviation: of all norms, by hand and fused, over every axis."""

    def loss(fn: nn.Module) -> Tensor:
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))
        return (fn(x) - 1).square().mean()

    assert worst(lambda: Shifted(NORMS[name]), loss, **{"debug.codegen": "eager", "saved.min_numel": 0}) > 30


def test_what_does_not_vary_has_no_gradient() -> None:
    """1e-3 where eager has 0, if a channel that is the same in the whole batch comes back off by a step."""
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64))
    x = torch.randn(1, 64).expand(256, 64).contiguous()
    compiled(model, linears="off", **{"debug.codegen": "eager"})(x).square().mean().backward()
    assert model[1].weight.grad is not None and float(model[1].weight.grad.abs().max()) < 1e-4


def test_the_report_says_what_a_value_is_stored_about() -> None:
    for make, name in (
        (lambda: linears(nn.LayerNorm(128)), ABOUT_MEAN),
        (lambda: linears(nn.BatchNorm1d(128)), ABOUT_BOTH),
    ):
        torch._dynamo.reset()
        fn = compiled(make(), linears="off", **{"debug.codegen": "eager"})
        fn(torch.randn(256, 64)).sum().backward()
        assert [s.codec for s in fp8compile.report(fn).saved] == [f"int8 1x128 ({name})"]


def test_a_norm_that_is_not_known_stays_exact() -> None:
    def half(h: Tensor) -> Tensor:
        return (h * 2 - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)

    fn = compiled(Shifted(half), linears="off", **{"debug.codegen": "eager", "saved.min_numel": 0})
    fn(torch.randn(256, 64)).sum().backward()
    report = fp8compile.report(fn)
    assert any("normalised in a way that is not known" in skip.reason for skip in report.skips)


class Steep(Shifted):
    """A value that a norm reads and a steep function besides; two deviations away from zero, where that is steep."""

    def __init__(self, norm: Callable[[Tensor], Tensor], besides: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda h: norm(h) + besides(h))
        self.a.bias.data.fill_(6.0)
        self.a.weight.data *= 5


BESIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "steep": lambda h: torch.tanh(50 * h),
    "steep, and its sign": lambda h: torch.tanh(50 * h) + F.relu(h),
    "an exponential": lambda h: torch.exp(4 * torch.sigmoid(h / 16)),
}


@pytest.mark.parametrize("besides", BESIDES)
@pytest.mark.parametrize("norm", ["layer", "batch by hand"])
def test_about_a_mean_e4m3_is_no_way_out_for_what_is_steep(norm: str, besides: str) -> None:
    """-1.6 dB: a code's error there is a share of the distance from the mean, and not of the value."""

    def loss(fn: nn.Module) -> Tensor:
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))
        return (fn(x) - 1).square().mean()

    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(Steep(NORMS[norm], BESIDES[besides]))
        return made[-1]

    assert worst(make, loss, **{"debug.codegen": "eager", "saved.min_numel": 0}) > 40
    assert not any(s.codec.startswith("e4m3") for s in fp8compile.report(made[-1]).saved)


def test_nothing_is_proven_of_a_small_channel_beside_large_ones() -> None:
    """In deviations a channel is off by a share of another's: a range of the value bounds no error of it."""

    def about(norm: str) -> set[str]:
        torch._dynamo.reset()
        model = Shifted(lambda h: NORMS[norm](s := torch.sigmoid(h - 100)) + torch.exp(4 * s))
        fn = compiled(model, linears="off", saved="int8", **{"debug.codegen": "eager", "saved.min_numel": 0})
        fn(torch.randn(256, 64)).sum().backward()
        return {s.codec for s in fp8compile.report(fn).saved}

    assert about("layer") == {f"int8 1x128 ({ABOUT_MEAN})"} and not about("batch by hand")
