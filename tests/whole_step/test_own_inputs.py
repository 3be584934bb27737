"""Cached weights and delayed scales in a whole step: numbers are those of the three calls, bit for bit, and codes are written
by the updates, in place."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.numerics import E4M3
from fp8compile.numerics.delayed import quantize_under
from fp8compile.optim.exchange import exchange
from fp8compile.whole_step.running import WholeGraph
from fp8compile.whole_step.step import TrainStep

linear_reasons = importlib.import_module("fp8compile.linears.reasons")

_prepared = WholeGraph._prepared
CACHED = {
    "linears": "tensorwise",
    "linears.emulate": True,
    "linears.cache_weights": True,
    "saved": "off",
    "debug.codegen": "eager",
}
DELAYED = {**CACHED, "linears.scaling": "delayed"}
RECIPES = {
    "cached": CACHED,
    "delayed": {**DELAYED, "linears.cache_weights": False},
    "cached and delayed": DELAYED,
}
STEPS = 6
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.sin())


def batches(n: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 32, generator=generator) for _ in range(n)]


def writing(model: nn.Module) -> torch.optim.Optimizer:
    return fp8compile.optim.AdamW(model, lr=1e-2, weight_codes=True, compiled=False)


MAKERS: dict[str, Make] = {
    "writes codes": writing,
    "writes none": lambda m: fp8compile.optim.AdamW(m, lr=1e-2, compiled=False),
    "SGD": lambda m: fp8compile.optim.SGD(m, lr=0.1, momentum=0.9, weight_codes=True, compiled=False),
    "masters": lambda m: fp8compile.optim.AdamW(
        m.bfloat16(), lr=1e-2, master="split", weight_codes=True, compiled=False
    ),
}


def three_calls(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: dict[str, Any]) -> Callable[..., Tensor]:
    compiled = torch.compile(lambda x: loss_fn(model, x), backend="fp8compile", options=recipe)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def pair(maker: str, recipe: dict[str, Any]) -> tuple[TrainStep, Callable[..., Tensor]]:
    """A whole step of a model, and the three calls of a copy of it."""
    mine = net()
    theirs = copy.deepcopy(mine)
    step = fp8compile.train_step(mine, loss_fn, MAKERS[maker](mine), recipe=recipe, fallback=False)
    return step, three_calls(theirs, MAKERS[maker](theirs), recipe)


def codes_of(model: nn.Module) -> list[Tensor]:
    """Every tensor of codes that a step has written of the model's weights."""
    return [t for p in model.parameters() for t in exchange.codes_of(p) if t is not None]


same_bits = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="graphs take addcmul and addcdiv apart there: two roundings, where the operators have one",
)


@same_bits
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("maker", MAKERS)
def test_it_equals_the_three_calls_bit_for_bit(maker: str, recipe: str) -> None:
    step, three = pair(maker, RECIPES[recipe])
    for x in batches():
        x = x.to(next(step.model.parameters()).dtype)
        assert torch.equal(step(x), three(x))
    assert step.summary.compilations == 1


def test_updates_write_the_codes_of_the_next_step_over_those_of_this_one() -> None:
    model = net()
    step = fp8compile.train_step(model, loss_fn, writing(model), recipe=CACHED, fallback=False)
    first, *others = batches()
    step(first)
    places = [codes.data_ptr() for codes in codes_of(model)]
    for x in others:
        before = [codes.clone() for codes in codes_of(model)]
        step(x)
        assert [codes.data_ptr() for codes in codes_of(model)] == places
        assert not all(map(torch.equal, before, codes_of(model)))
    for layer in (model[0], model[2]):
        found = exchange.of(layer.weight)
        assert found is not None and found.wanted is not None and not found.clipped
        expected = quantize_under(layer.weight.detach(), found.inv_scale, E4M3).view(torch.uint8)
        for codes in (found.by_rows, None if found.transposed is None else found.transposed.t()):
            assert codes is None or torch.equal(codes.view(torch.uint8), expected)
    assert step.summary.coded == step.summary.codes == 2
    assert "codes of 2 of 2 weights are written by their updates" in str(step.summary)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (MAKERS["writes none"], "weight_codes=False"),
        (lambda m: torch.optim.AdamW(m.parameters()), "use fp8compile.optim.AdamW with weight_codes=True"),
        (MAKERS["SGD"], "SGD"),
    ],
)
def test_why_updates_write_no_codes_is_told(make: Make, reason: str) -> None:
    model = net()
    step = fp8compile.train_step(model, loss_fn, make(model), recipe=CACHED, fallback=False)
    step(batches(1)[0])
    assert step.summary.codes == 2 and step.summary.coded == 0
    assert "codes of 0 of 2 weights" in str(step.summary) and reason in str(step.summary)


@same_bits
def test_a_weight_that_is_changed_between_steps_has_new_codes() -> None:
    mine = net()
    theirs = copy.deepcopy(mine)
    step = fp8compile.train_step(mine, loss_fn, writing(mine), recipe=CACHED, fallback=False)
    three = three_calls(theirs, writing(theirs), CACHED)
    for at, x in enumerate(batches()):
        if at == 3:
            with torch.no_grad():
                mine[2].weight.mul_(1.5)
                theirs[2].weight.mul_(1.5)
        assert torch.equal(step(x), three(x))
    assert step.summary.compilations == 1


def test_accumulated_gradients_and_clipping_go_with_it() -> None:
    mine = net()
    theirs = copy.deepcopy(mine)
    step = fp8compile.train_step(mine, loss_fn, writing(mine), recipe=DELAYED, clip_norm=0.05, fallback=False)
    compiled = torch.compile(lambda x: loss_fn(theirs, x), backend="fp8compile", options=CACHED)
    optimizer = writing(theirs)
    for x, y in zip(batches(), batches(), strict=True):
        step.accumulate(x)
        step(y)
        for each in (x, y):
            compiled(each).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert step.grad_norm is not None
        torch.testing.assert_close(step.grad_norm, norm, rtol=0.05, atol=0.0)  # other scales: codes differ
    assert fp8compile.tools.scaling_state(mine).weight_bytes > 0


def test_a_backward_that_waits_finds_its_codes_overwritten_and_says_so() -> None:
    model = net()
    step = fp8compile.train_step(model, loss_fn, writing(model), recipe=CACHED, fallback=False)
    x = batches(1)[0]
    step(x)
    waiting = torch.compile(model, backend="fp8compile", options=CACHED)(x).sum()
    step(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


def test_a_step_that_fails_half_way_leaves_no_codes_of_weights_that_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    step = fp8compile.train_step(model, loss_fn, writing(model), recipe=CACHED, fallback=False)
    x = batches(1)[0]
    step(x)
    assert exchange.of(model[2].weight) is not None

    def fails(values: list[Any]) -> None:
        values.clear()
        raise MemoryError("half way")

    monkeypatch.setattr(WholeGraph, "_prepared", lambda self, *_: (*_prepared(self, *_)[:1], fails, self._ready[2]))
    with pytest.raises(MemoryError, match="half way"):
        step(x)
    assert exchange.of(model[2].weight) is None


def test_frozen_weights_are_not_counted_as_left_out() -> None:
    model = net()
    model[2].requires_grad_(False)
    step = fp8compile.train_step(model, loss_fn, writing(model), recipe=CACHED, fallback=False)
    step(batches(1)[0])
    assert step.summary.coded == step.summary.codes == 1 and step.summary.not_coded is None


@pytest.fixture
def fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears by ``_scaled_mm``, which a CPU has too: their dgrads take codes transposed."""
    monkeypatch.setattr(linear_reasons, "fp8_unsupported_reason", lambda device: None)


@pytest.mark.usefixtures("fp8_units")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_codes_by_rows_and_transposed_are_those_of_the_new_weight(codegen: str) -> None:
    model = net()
    recipe = {**CACHED, "linears.emulate": False, "debug.codegen": codegen}
    step = fp8compile.train_step(model, loss_fn, writing(model), recipe=recipe, fallback=False)
    for x in batches(3):
        step(x)
    layouts = []
    for layer in (model[0], model[2]):
        found = exchange.of(layer.weight)
        assert found is not None and found.by_rows is not None
        expected = quantize_under(layer.weight.detach(), found.inv_scale, E4M3).view(torch.uint8)
        assert torch.equal(found.by_rows.view(torch.uint8), expected)
        layouts.append(found.transposed is not None)
        assert found.transposed is None or torch.equal(found.transposed.view(torch.uint8), expected.t())
    assert layouts == [False, True], "the input needs no gradient"


class Siblings(nn.Module):
    """Two linears of one value, whose dgrads can be one matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        y: Tensor = self.first(x).sin() * self.second(x)
        return y


@pytest.mark.usefixtures("fp8_units")
def test_codes_that_another_graph_takes_as_one_matrix_are_packed_anew() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Siblings()
    optimizer = fp8compile.optim.AdamW(model, lr=3e-2, weight_codes=True, compiled=False)
    step = fp8compile.train_step(
        model, loss_fn, optimizer, recipe={**CACHED, "linears.emulate": False}, fallback=False
    )
    merged = {**DELAYED, "linears.emulate": False, "linears.merge_dgrads": True}
    other = torch.compile(lambda x: loss_fn(model, x), backend="fp8compile", options=merged)
    for x in batches():
        (found,) = torch.autograd.grad(other(x), [model.before.weight])
        (expected,) = torch.autograd.grad(loss_fn(model, x), [model.before.weight])
        assert (found - expected).norm() < 0.2 * expected.norm()
        step(x)
    assert step.summary.coded == 3


def test_codes_of_another_dtype_are_left_to_the_graph_that_takes_them() -> None:
    model = net()
    step = fp8compile.train_step(model, loss_fn, writing(model), recipe=CACHED, fallback=False)
    other = torch.compile(lambda x: loss_fn(model, x), backend="fp8compile", options=CACHED)
    for x in batches(3):
        step.accumulate(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other(x).backward()
        step(x)
        for layer in (model[0], model[2]):
            found = exchange.of(layer.weight)
            if found is not None and found.wanted is not None:
                weight = layer.weight.detach().to(found.wanted.dtype)
                expected = quantize_under(weight, found.inv_scale, E4M3).view(torch.uint8)
                assert found.by_rows is not None and torch.equal(found.by_rows.view(torch.uint8), expected)
    assert step.summary.coded == 0 and "takes other codes of the same weight" in str(step.summary)


def test_delayed_scales_of_no_linear_are_none() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 10))
    theirs = copy.deepcopy(mine)
    step = fp8compile.train_step(mine, loss_fn, writing(mine), recipe=DELAYED, fallback=False)
    three = three_calls(theirs, writing(theirs), DELAYED)
    for x in batches(3):
        assert torch.equal(step(x[:, :10]), three(x[:, :10]))


def test_the_first_momentum_of_sgd_is_not_damped_behind_a_step_that_measures() -> None:
    mine = net()
    theirs = copy.deepcopy(mine)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    recipe = {**DELAYED, "linears.cache_weights": False}
    step = fp8compile.train_step(
        mine, loss_fn, torch.optim.SGD(mine.parameters(), **options), recipe=recipe, fallback=False
    )
    three = three_calls(theirs, torch.optim.SGD(theirs.parameters(), **options), recipe)
    for x in batches():
        torch.testing.assert_close(step(x), three(x), rtol=1e-5, atol=0.0)
    assert step.summary.compilations == 1


def test_merged_dgrads_are_declined() -> None:
    torch._dynamo.reset()
    model = Siblings()
    with pytest.raises(ValueError, match="merge_dgrads takes codes of several weights as one matrix"):
        fp8compile.train_step(
            model, loss_fn, writing(model), recipe={**DELAYED, "linears.merge_dgrads": True}, fallback=False
        )(batches(1)[0])
