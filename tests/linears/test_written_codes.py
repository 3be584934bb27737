"""Weights whose codes the optimizer's step writes: nothing encodes them anew but a change, and every change is seen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8compile
from fp8compile.linears import weight_codes
from fp8compile.numerics.delayed import quantize_under
from fp8compile.numerics.formats import E4M3
from fp8compile.optim.exchange import exchange
from tests.linears.plain import Plain, count, data
from tests.support.measure import compiled

CACHED = {"linears.emulate": True, "saved": "off", "linears.cache_weights": True}
WEIGHTS = 2


class Run:
    """A model in training whose optimizer writes codes; ``losses`` of all calls so far."""

    def __init__(self, make: Any = fp8compile.optim.AdamW, codes: bool = True) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Plain()
        self.optimizer = make(self.model, 0.01, weight_codes=codes, compiled=False)
        self.run, self.losses, self.calls = compiled(self.model, **CACHED), list[float](), 0

    def backward(self) -> None:
        loss = self.run(data(self.calls)).square().mean()
        loss.backward()
        self.calls += 1
        self.losses.append(float(loss.detach()))

    def step(self, micro: int = 2) -> None:
        for _ in range(micro):
            self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weights(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.dim() == 2]

    def given(self) -> list[Tensor]:
        """The codes that the next call takes, decoded."""
        layouts = weight_codes.Layouts(torch.float32, by_rows=True, transposed=False)  # what emulation takes
        found = weight_codes.store.up_to_date([(weight, layouts) for weight in self.weights], False)
        return [codes.float() * inv_scale for codes, _, inv_scale in found if codes is not None]

    def is_exact(self) -> bool:
        """Whether codes stand for the weights as they are: within half a step of E4M3."""
        return all(
            bool(((x - w).abs() <= w.abs() * E4M3.half_ulp + w.abs().amax() * 2.0**-16).all())
            for x, w in zip(self.given(), self.weights, strict=True)
        )


@pytest.mark.parametrize("make", ["AdamW", "Adam", "Lion", "RMSprop"])
def test_weights_are_encoded_in_the_first_step_alone(make: str) -> None:
    with count() as found:
        run = Run(getattr(fp8compile.optim, make))
        run.step()
        assert found == [2 * WEIGHTS], "not trusted until a change was told of"
        for _ in range(4):
            run.step()
            for weight in run.weights:
                written = exchange.of(weight)
                codes = quantize_under(weight.detach(), written.inv_scale, E4M3)  # type: ignore[union-attr]
                assert torch.equal(codes.view(torch.uint8), written.by_rows.view(torch.uint8))  # type: ignore[union-attr]
        assert run.is_exact() and found == [2 * WEIGHTS]


def test_losses_are_near_those_of_measured_scales_and_sgd_s_are_the_same() -> None:
    """Only codes in the subnormals, and those that a power of two rounds otherwise, differ."""
    pairs = {}
    for make in (fp8compile.optim.AdamW, fp8compile.optim.SGD):
        pairs[make] = []
        for codes in (False, True):
            run = Run(make, codes)
            for _ in range(4):
                run.step()
            pairs[make].append(run.losses)
    assert pairs[fp8compile.optim.SGD][0] == pairs[fp8compile.optim.SGD][1], "no bound: its weights are measured"
    measured, predicted = pairs[fp8compile.optim.AdamW]
    assert measured != predicted and measured == pytest.approx(predicted, rel=0.05)


def no_grad(change: Callable[[Tensor], object]) -> Callable[[Run], object]:
    def changed(run: Run) -> None:
        with torch.no_grad():
            change(run.model.a.weight)

    return changed


CHANGES: dict[str, tuple[Callable[[Run], object], int]] = {
    "nothing": (lambda run: None, 0),
    "a jump": (no_grad(lambda w: w.mul_(1000)), 1),
    "one element": (no_grad(lambda w: w[3, 5].mul_(1000)), 1),
    "load_state_dict": (
        lambda run: run.model.load_state_dict({n: 2 * v for n, v in run.model.state_dict().items()}),
        2,
    ),
    "data replaced": (lambda run: setattr(run.model.a.weight, "data", 1000 * run.model.a.weight.data), 1),
    "forgotten": (lambda run: fp8compile.tools.scaling_state(run.model).forget_weights(), 2),
    "another optimizer": (lambda run: torch.optim.SGD(run.model.parameters(), 1.0, fused=True).step(), 2),
}


@pytest.mark.parametrize("when", ["behind the step", "before the step"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str, when: str) -> None:
    """Behind the step, the next call encodes the weight; before it, the step's scale is that of the weight as it is."""
    change, times = CHANGES[name]
    run = Run()
    for _ in range(2):
        run.step()
    with count() as found:
        if when == "before the step":
            run.backward()
        else:
            run.model.a.weight.grad = torch.ones_like(run.model.a.weight) if name == "another optimizer" else None
            run.model.b.weight.grad = torch.ones_like(run.model.b.weight) if name == "another optimizer" else None
        change(run)
        if when == "behind the step":
            assert run.is_exact() and found == [times]
        run.model.zero_grad()
        run.step(1)
        assert run.is_exact()
        run.step()
        assert run.is_exact()


def test_a_jump_through_data_that_no_one_counts_clips_and_is_seen_and_distrusted() -> None:
    """Made so that the 256 samples do not see it: the step's own statistics do."""
    run = Run()
    for _ in range(2):
        run.step()
    run.backward()
    run.model.a.weight.data[3, 5] = 1000.0
    run.optimizer.step()
    assert bool(exchange.of(run.model.a.weight).clipped)  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="no version counter"):
        assert run.is_exact()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            run.step()
            assert run.is_exact()


def test_a_weight_that_is_not_finite_is_not_hidden() -> None:
    run = Run()
    for _ in range(2):
        run.step()
    run.backward()
    run.model.a.weight.grad[0, 0] = torch.inf  # type: ignore[index]
    run.optimizer.step()
    (codes, *_) = run.given()
    assert bool(codes[0, 0].isnan()) and int(codes.isnan().sum()) == 1
    run.backward()
    assert not run.losses[-1] < torch.inf
    assert "nan" in str(fp8compile.tools.scaling_state(run.model))


@pytest.mark.parametrize("with_scales", [True, False])
def test_a_resumed_run_goes_on_to_the_bit(with_scales: bool) -> None:
    """With the scales; without them, the first call's are measured, which is as exact and not the same."""
    run = Run()
    for _ in range(3):
        run.step()
    state = fp8compile.tools.scaling_state(run.model)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), state.state_dict()))
    assert set(saved[2]["weights"]) == {"a.weight", "b.weight"}
    run.losses.clear()
    for _ in range(3):
        run.step()
    again = Run()
    again.calls = 6
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    if with_scales:
        fp8compile.tools.scaling_state(again.model).load_state_dict(saved[2])
        assert "from a checkpoint" in str(fp8compile.tools.scaling_state(again.model))
    for _ in range(3):
        again.step()
    assert (again.losses == run.losses) == with_scales
    assert again.losses == pytest.approx(run.losses, rel=0.05)
    same = [torch.equal(p, q) for p, q in zip(run.model.parameters(), again.model.parameters(), strict=True)]
    assert all(same) == with_scales


def test_wrong_scales_from_a_checkpoint_are_not_taken() -> None:
    """Too small a scale would clip, and what the step is to start from is measured."""
    run = Run()
    run.step()
    state = fp8compile.tools.scaling_state(run.model)
    saved = state.state_dict()
    for value in saved["weights"].values():
        value.mul_(1e-6)
    state.load_state_dict(saved)
    assert run.is_exact()
    run.step()
    assert run.is_exact() and not any(exchange.of(w).clipped for w in run.weights)  # type: ignore[union-attr]


def test_a_state_that_does_not_fit_is_refused() -> None:
    run = Run()
    run.step()
    state = fp8compile.tools.scaling_state(run.model)
    saved = state.state_dict()
    for wrong in ({"c.weight": torch.zeros(3)}, {"a.weight": torch.zeros(2)}):
        with pytest.raises(ValueError, match="weight"):
            state.load_state_dict(saved | {"weights": wrong})


def test_gradients_that_are_released_in_the_backward() -> None:
    with count() as found:
        run = Run()
        run.step()
        release = run.optimizer.release_gradients(run.model)
        for _ in range(3):
            run.backward()
            assert run.is_exact()
        release.remove()
        assert found == [2 * WEIGHTS]


def test_ranks_with_equal_weights_have_equal_codes() -> None:
    """Each rank of data-parallel training computes the same step of the same weights."""
    ours, theirs = Run(), Run()
    for _ in range(3):
        ours.step()
    for _ in range(3):
        theirs.step()
    for x, y in zip(ours.weights, theirs.weights, strict=True):
        a, b = exchange.of(x), exchange.of(y)
        assert a is not None and b is not None and torch.equal(a.inv_scale, b.inv_scale)
        assert torch.equal(a.by_rows.view(torch.uint8), b.by_rows.view(torch.uint8))  # type: ignore[union-attr]


def test_the_state_is_printed() -> None:
    run = Run()
    run.step()
    text = str(fp8compile.tools.scaling_state(run.model))
    assert "a.weight" in text and "predicted by the step" in text


def test_the_bytes_of_codes_are_told_before_and_after_a_call_takes_them() -> None:
    run = Run()
    run.step()
    run.step()
    behind_a_step = fp8compile.tools.scaling_state(run.model).weight_bytes
    run.backward()
    expected = sum(weight.numel() + 4 for weight in run.weights)  # a byte an element, a scale
    assert behind_a_step == fp8compile.tools.scaling_state(run.model).weight_bytes == expected
