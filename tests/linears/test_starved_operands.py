"""Delayed scaling of operands that are not used in each pass, and of gradients that ``backward`` does not ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.measure import compiled, sqnr_db

OPTIONS = {"linears.emulate": True, "saved": "off"}
Gradients = dict[str, Tensor]
Pass = Callable[[nn.Module, Callable[..., Any], int], Gradients]
WITHIN = 1.0  # dB of dynamic scaling


def data(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(128, 64, generator=g), torch.randint(0, 64, (128,), generator=g)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor, used: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = x + used * self.b(torch.tanh(self.a(x)))
        return y


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.trunk(x))
        return self.a(x), self.b(x)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)
        nn.init.zeros_(self.b.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


def after(loss: Tensor, model: nn.Module) -> Gradients:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.dim() == 2 and p.grad.any()}


def losses_of(make: Callable[[], nn.Module], run: Pass, passes: int, learns: bool = False) -> Iterator[list[float]]:
    """For each pass that has a gradient, by parameter: by how many dB dynamic scaling is nearer to exact gradients."""
    torch.manual_seed(0)
    exact = make()
    models = [copy.deepcopy(exact) for _ in range(2)]
    calls = [
        compiled(m, **OPTIONS, **{"linears.scaling": s}) for m, s in zip(models, ("dynamic", "delayed"), strict=True)
    ]
    for i in range(passes):
        want = run(exact, exact, i)
        dynamic, delayed = (run(m, call, i) for m, call in zip(models, calls, strict=True))
        zero = {n: torch.zeros_like(g) for n, g in want.items()} | delayed
        if want:
            yield [sqnr_db(g, dynamic[n]) - sqnr_db(g, zero[n]) for n, g in want.items()]
        for p, *others in zip(exact.parameters(), *(m.parameters() for m in models), strict=True):
            for each in (p, *others) if learns and p.grad is not None else ():
                each.data.sub_(0.1 * p.grad)


def expert(period: int, first: int, scale: float = 1.0) -> Pass:
    def run(model: nn.Module, call: Callable[..., Any], i: int) -> Gradients:
        used = i >= first and (i - first) % period == 0
        found = after(call(data(i)[0], torch.tensor(scale * used)).square().mean(), model)
        return found if used else {}

    return run


@pytest.mark.parametrize("period", [2, 5, 20])
def test_an_expert_that_seldom_runs_trains_from_its_first_use(period: int) -> None:
    for losses in losses_of(Expert, expert(period, period - 1), 3 * period):
        assert max(losses) < WITHIN


@pytest.mark.parametrize("scale", [1.0, 1e-2, 30.0])
def test_an_expert_that_comes_late_has_the_scales_of_its_kind(scale: float) -> None:
    """Nobody waits for it any more in pass 45. What is larger than all of its kind is clipped to the largest of these."""
    first, *rest = losses_of(Expert, expert(10, 45, scale), 70)
    assert max(first) < WITHIN if scale <= 1 else 3 < max(first) < 30
    assert len(rest) == 2 and max(max(losses) for losses in rest) < WITHIN


def ignored(model: nn.Module, call: Callable[..., Any], i: int) -> Gradients:
    x, labels = data(i)
    none = torch.full_like(labels, -100)
    each = ((labels, none), (none, labels), (none, none))[i % 3]
    return after(sum(F.cross_entropy(y, t, reduction="sum") for y, t in zip(call(x), each, strict=True)), model)


def tasks(model: nn.Module, call: Callable[..., Any], i: int) -> Gradients:
    x, labels = data(i)
    weights = ((1.0, 0.0), (0.0, 100.0))[i % 2]
    return after(sum(w * F.cross_entropy(y, labels) for y, w in zip(call(x), weights, strict=True)), model)


@pytest.mark.parametrize("run", [ignored, tasks])
def test_labels_ignored_and_tasks_in_turn_lose_nothing(run: Pass) -> None:
    assert max(max(losses) for losses in losses_of(Heads, run, 9)) < WITHIN


def test_what_begins_as_zeros_loses_no_step() -> None:
    def run(model: nn.Module, call: Callable[..., Any], i: int) -> Gradients:
        x = data(i)[0]
        return after((call(x) - x).square().mean(), model)

    found = list(losses_of(Lora, run, 4, learns=True))
    assert [len(losses) for losses in found] == [1, 2, 2, 2]
    assert max(max(losses) for losses in found) < WITHIN


class Chain(nn.Module):
    """Three graphs, without a path around a linear: what the second and third get is computed from codes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        for linear in self.linears:
            nn.init.normal_(linear.weight, std=0.25)

    def pair(self, x: Tensor, i: int) -> Tensor:
        return F.gelu(self.linears[i + 1](F.gelu(self.linears[i](x))))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.pair(x, 0)
        torch._dynamo.graph_break()
        x = self.pair(x, 2)
        torch._dynamo.graph_break()
        return (self.pair(x, 4),)


@pytest.mark.parametrize(
    "make, factor, since", [(Heads, 20, 0), (Heads, 20, 4), (Heads, 1000, 4), (Chain, 20, 4), (Chain, 1000, 4)]
)
def test_the_gradient_of_another_loss_is_remembered(make: Callable[[], nn.Module], factor: int, since: int) -> None:
    """By ``autograd.grad``, which gives our leaf nothing. A pass with the usual loss stands between two of its uses."""

    def run(model: nn.Module, call: Callable[..., Any], i: int) -> Gradients:
        x, other = data(i)[0], {}
        if i >= since:
            loss = factor * sum(call(x)).square().mean()  # type: ignore[arg-type, attr-defined]
            other = {"other": torch.autograd.grad(loss, [next(model.parameters())])[0]}
        return after(sum(call(x)).square().mean(), model) | other  # type: ignore[arg-type, attr-defined]

    found = list(losses_of(make, run, 8))
    if since:
        assert max(found.pop(since)) > 10, "clipped once"
        assert max(found[since]) < WITHIN, "the second use"
    others = [losses[-1] for losses in found[since:]]  # one differs by how its values lie between codes
    assert sum(others) / len(others) < WITHIN
