"""Slots, as compiled graphs have them, made by hand: found by loss and by parameters, saturated, shared by a GAN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.amp import LossScaler
from fp8compile.fx.aot import BACKWARD
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import statistics
from fp8compile.observe.records import ACTIVATION, StatisticsRow, StatsSlot
from tests.support.amp_models import grown


class Graph(torch.autograd.Function):
    """x * weight, whose backward also gives the slot what it saw of the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0), statistics(g * weight)[None]


class Compiled(nn.Module):
    """A module with a slot of its own; ``weight`` None: it has no parameter."""

    def __init__(self, weight: float | None = 1.0) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(torch.full((4,), weight, dtype=torch.float16))
        rows = (StatisticsRow("m", "", "mul", ACTIVATION, BACKWARD, "f16"),)
        parameters = [] if self.weight is None else [self.weight]
        self.slot = StatsSlot(dict(enumerate(rows)), 1, torch.device("cpu"), parameters)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ones(4, dtype=torch.float16) if self.weight is None else self.weight
        return Graph.apply(x, weight, self.slot.values)  # type: ignore[no-any-return]


def step(scaler: LossScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def x(requires_grad: bool = True) -> Tensor:
    return torch.ones(3, 4, dtype=torch.float16, requires_grad=requires_grad)


@pytest.mark.parametrize("mode", ["histogram", "dynamic", "static"])
def test_a_slot_is_bound_before_the_first_backward(mode: str) -> None:
    model = Compiled()
    scaler = LossScaler(mode, init_scale=4.0)
    other = Compiled()
    loss = scaler.scale(model(x()).float().sum())
    assert scaler.observations == [model.slot]
    assert model.slot.limit == (FP16_MAX if mode == "histogram" else torch.inf)
    assert other.slot.limit == torch.inf
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.step(optimizer)
    scaler.update()
    assert [step for step, _ in model.slot.history] == [1] and model.slot.history[0][1][0, 0] == 12
    assert not other.slot.history


def test_a_graph_without_parameters_is_found_by_its_loss() -> None:
    model, loss_fn = Compiled(), Compiled(None)
    scaler = LossScaler()
    step(scaler, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn(model(x())).float().sum())
    assert scaler.observations == [model.slot, loss_fn.slot]
    assert [len(each.history) for each in scaler.observations] == [1, 1]


def test_what_no_loss_passes_is_not_bound() -> None:
    first, second = Compiled(), Compiled()
    scaler = LossScaler()
    step(scaler, torch.optim.SGD(first.parameters(), lr=0.0), first(x()).float().sum())
    assert scaler.observations == [first.slot] and second.slot.limit == torch.inf


@pytest.mark.parametrize("generator_first", [False, True])
def test_a_gan_counts_by_whose_loss_it_is(generator_first: bool) -> None:
    """The generator's gradients are large in both graphs, the discriminator's are not."""
    generator, discriminator = Compiled(), Compiled()
    scalers = grown(LossScaler(growth_interval=1), 16.0), grown(LossScaler(growth_interval=1), 16.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (generator, discriminator)]
    for i in range(4):
        for who in (0, 1) if generator_first else (1, 0):
            if who == 0:
                step(scalers[0], optimizers[0], discriminator(generator(x())).float().sum() * 2.0**11)
            else:
                step(
                    scalers[1],
                    optimizers[1],
                    discriminator(generator(x(False)).detach().requires_grad_()).float().sum(),
                )
        assert scalers[1].get_scale() == 2.0 ** (5 + i)
    assert [scale for _, scale in scalers[0].history] == [8.0, 4.0, 8.0, 4.0]
    assert scalers[0].observations == [generator.slot] and scalers[1].observations == [discriminator.slot]


def test_two_models_whose_steps_interleave() -> None:
    """Both losses are scaled before either is propagated; they share nothing, so each has its own."""
    models = Compiled(), Compiled(2.0**10)
    scalers = grown(LossScaler(), 16.0), grown(LossScaler(), 16.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    losses = [scaler.scale(m(x()).float().sum()) for scaler, m in zip(scalers, models, strict=True)]
    for loss in losses:
        loss.backward()
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.step(optimizer)
        scaler.update()
    assert [scaler.get_scale() for scaler in scalers] == [32.0, 8.0]
    assert [len(m.slot.history) for m in models] == [1, 1]


def test_a_gan_whose_steps_come_after_both_backwards() -> None:
    """The generator's backward adds to the discriminator's graph before the discriminator's update."""
    generator, discriminator = Compiled(), Compiled()
    scalers = grown(LossScaler(), 16.0), grown(LossScaler(), 16.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (generator, discriminator)]
    scalers[1].scale(discriminator(generator(x(False)).detach().requires_grad_()).float().sum()).backward()
    scalers[0].scale(discriminator(generator(x())).float().sum() * 2.0**10).backward()
    for who in (1, 0):
        scalers[who].step(optimizers[who])
        scalers[who].update()
    assert [scaler.get_scale() for scaler in scalers] == [8.0, 32.0]
    assert discriminator.slot.history[0][1][0, :2].tolist() == [12, 0]  # its own loss
    assert discriminator.slot.history[1][1][0, :2].tolist() == [0, 12]  # the generator's
