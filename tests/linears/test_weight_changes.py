"""Whatever changes a weight, and however it does it: a model that keeps codes computes what one without a cache computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile._version import release_of
from fp8compile.linears import weight_changes, weight_codes
from tests.linears.plain import Plain, count, data
from tests.support.measure import compiled

CACHED = {"linears.emulate": True, "saved": "off", "linears.cache_weights": True}
Change = Callable[["Plain"], object]


def trained(
    cache: bool, update: Callable[[Plain], Callable[[], object]], steps: int = 4, micro: int = 2
) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Plain()
    run, step, losses = compiled(model, **CACHED | {"linears.cache_weights": cache}), update(model), []
    for i in range(steps * micro):
        loss = run(data(i)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if (i + 1) % micro == 0:
            step()
            model.zero_grad(set_to_none=False)  # compiled steps keep their graphs
    return losses


TRUSTED, EACH_CALL = 4 + 3 * 2, 4 * 4  # two weights, four steps of two micro-batches
OPTIM = torch.optim
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "SGD": (lambda p: OPTIM.SGD(p, 0.1, foreach=False), TRUSTED),
    "SGD foreach": (lambda p: OPTIM.SGD(p, 0.1, momentum=0.9, foreach=True), TRUSTED),
    "AdamW": (lambda p: OPTIM.AdamW(p, 0.01, foreach=False), TRUSTED),
    "AdamW foreach": (lambda p: OPTIM.AdamW(p, 0.01, foreach=True), TRUSTED),
    "Adafactor": (lambda p: OPTIM.Adafactor(p), TRUSTED),
    # torch's fused kernels count no version (torch 2.13), but their steps are told of
    "SGD fused": (lambda p: OPTIM.SGD(p, 0.1, fused=True), TRUSTED),
    "AdamW fused": (lambda p: OPTIM.AdamW(p, 0.01, fused=True), TRUSTED),
    "ours: AdamW": (lambda p: fp8compile.optim.AdamW(p, 0.01), TRUSTED),
    "ours: SGD": (lambda p: fp8compile.optim.SGD(p, 0.1), TRUSTED),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_is_missed_and_those_that_count_are_trusted(name: str) -> None:
    make, times = OPTIMIZERS[name]
    with count() as found:
        losses = trained(True, lambda model: make(model.parameters()).step)
    assert found == [times]
    assert losses == trained(False, lambda model: make(model.parameters()).step) and losses[-1] < losses[0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_optimizer_steps_are_counted(backend: str) -> None:
    def update(model: Plain) -> Callable[[], object]:
        optimizer = OPTIM.SGD(model.parameters(), 0.1)
        return torch.compile(lambda: optimizer.step(), backend=backend)

    with count() as found:
        losses = trained(True, update)
    assert found == [TRUSTED] and losses == trained(False, update) and losses[-1] < losses[0]


def test_a_compiled_fused_step_is_told_by_nobody_and_never_trusted() -> None:
    def update(model: Plain) -> Callable[[], object]:
        optimizer = OPTIM.SGD(model.parameters(), 0.1, fused=True)
        return torch.compile(lambda: optimizer.step(), backend="aot_eager")

    with count() as found:
        losses = trained(True, update)
    assert found[0] in (TRUSTED, EACH_CALL) and losses == trained(False, update)


def through_data(model: Plain) -> Callable[[], None]:
    def update() -> None:
        for p in model.parameters():
            p.data -= 0.1 * p.grad  # type: ignore[operator]

    return update


def test_a_loop_through_data_is_never_trusted() -> None:
    with count() as found:
        losses = trained(True, through_data)
    assert found == [EACH_CALL] and losses == trained(False, through_data)


class Trusted:
    """A model whose weights are taken for unchanged, and the same model without a cache."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Plain()
        self.run, optimizer = compiled(self.model, **CACHED), OPTIM.SGD(self.model.parameters(), 0.1)
        for _ in range(2):
            self.run(data()).square().mean().backward()
            optimizer.step()
        self.is_exact()

    def is_exact(self) -> bool:
        other = copy.deepcopy(self.model)
        want = compiled(other, **CACHED | {"linears.cache_weights": False})(data())
        return torch.equal(self.run(data()), want)


def averaged(model: Plain) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.lerp_(torch.ones_like(p), 0.01)


def replaced(model: Plain) -> None:
    model.a.weight = nn.Parameter(2 * model.a.weight.detach())


def in_inference_mode(model: Plain) -> None:
    with torch.inference_mode():
        model.a.weight.mul_(2)


CHANGES: dict[str, tuple[Change, int]] = {
    "nothing": (lambda m: None, 0),
    "one element": (lambda m: m.a.weight.detach()[3, 5].mul_(9), 1),
    "load_state_dict": (lambda m: m.load_state_dict({n: 2 * v for n, v in m.state_dict().items()}), 2),
    "load_state_dict(assign)": (
        lambda m: m.load_state_dict({n: 2 * v for n, v in m.state_dict().items()}, assign=True),
        2,
    ),
    "data replaced": (lambda m: setattr(m.a.weight, "data", 2 * m.a.weight.data), 1),
    "averaged": (averaged, 2),
    "a new parameter": (replaced, 1),
    "in inference mode": (in_inference_mode, 1),
    "forgotten": (
        lambda m: (m.a.weight.data[3, 5].mul_(9), fp8compile.tools.scaling_state(m).forget_weights()),
        2,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_trusted_weight_that_changes_is_encoded_anew(name: str) -> None:
    change, times = CHANGES[name]
    case = Trusted()
    with count() as found:
        change(case.model)
        assert case.is_exact() and found == [times]


def test_weights_that_are_swapped_for_an_evaluation_with_gradients_come_back() -> None:
    case = Trusted()
    own = {n: v.clone() for n, v in case.model.state_dict().items()}
    before = case.run(data()).detach()
    for weights, same in (({n: 0.5 * v for n, v in own.items()}, False), (own, True)):
        with torch.no_grad():
            for n, p in case.model.named_parameters():
                p.copy_(weights[n])
        assert case.is_exact() and torch.equal(case.run(data()), before) == same


@pytest.mark.parametrize("edit", ["all", "columns", "rows"])
def test_an_unseen_edit_is_noticed_before_codes_are_used_and_ends_the_trust(edit: str) -> None:
    """On a CPU. An edit of a few columns or rows is one that 256 samples lie in."""
    case = Trusted()
    part = {"all": ..., "columns": (slice(None), slice(8, 16)), "rows": slice(20, 24)}[edit]
    case.model.a.weight.data[part] *= 1.5
    with pytest.warns(UserWarning) as told:
        assert case.is_exact()
    assert [str(w.message) for w in told if "FP8 linear" in str(w.message)] == [weight_codes.UNSEEN]
    with count() as found:
        case.model.a.weight.data[3, 5] *= 9  # never looked at, and no longer needed to be
        assert case.is_exact() and case.is_exact() and found[0] >= 2


def test_fused_steps_behind_a_counted_change_are_told_of() -> None:
    """The version was seen to change, by load_state_dict; torch's fused steps count none."""
    case = Trusted()
    optimizer = OPTIM.AdamW(case.model.parameters(), 0.01, fused=True)
    with warnings.catch_warnings(), count() as found:
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step()
            assert case.is_exact() and case.is_exact()
    assert found[0] >= 3


def test_an_answer_that_is_late_is_heard_one_call_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the call behind an unseen edit has old codes, the next one says so and is exact."""
    case = Trusted()
    monkeypatch.setattr(weight_codes.PendingBool, "arrived", property(lambda self: False))
    case.model.a.weight.data.mul_(1.5)
    with count():
        assert not case.is_exact()
    monkeypatch.setattr(weight_codes.PendingBool, "arrived", True)
    with pytest.warns(UserWarning, match="may have used its old codes"):
        assert case.is_exact()


def test_weights_are_looked_at_in_each_column_and_bit_by_bit() -> None:
    weight = nn.Parameter(torch.zeros(512, 64), requires_grad=False)
    watched = weight_changes.WeightVersion()
    watched.look(weight)
    assert len(watched.sample) <= weight_changes.SAMPLES
    assert watched.is_as_it_was(weight) and not weight_changes.differ([(watched, weight)])
    for column in range(64):
        weight.data[:, column] = -0.0  # equal to what it was, and other bits
        assert weight_changes.differ([(watched, weight)]), column
        weight.data[:, column] = 0.0
    weight.data[7] = float("nan")
    watched.look(weight)
    assert not weight_changes.differ([(watched, weight)]), "a NaN is what it was"


@pytest.mark.skipif(
    release_of(torch.__version__) < (2, 12),
    reason="torch 2.11 gives a parameter that is thawed no gradient, whatever the backend: it does not compile again",
)
def test_a_weight_that_is_thawed_is_not_trusted_until_its_version_changes() -> None:
    torch.manual_seed(0)
    model = Plain().requires_grad_(False)
    run, x = compiled(model, **CACHED), data().requires_grad_()
    with count() as found:
        for _ in range(2):
            run(x).sum().backward()
        assert found == [2]
        model.requires_grad_(True)
        for times in (4, 6, 8):
            run(x).sum().backward()
            through_data(model)()
            assert found == [times]


def test_a_backward_has_the_codes_of_its_forward() -> None:
    """Although the weight has other codes by then."""
    found = []
    for late in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Plain().requires_grad_(False), data().requires_grad_()
        run = compiled(model, **CACHED | {"linears.cache_weights": late})
        loss = run(x).square().mean()
        if late:
            model.a.weight.data = 2 * model.a.weight.data
            run(x)
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)
