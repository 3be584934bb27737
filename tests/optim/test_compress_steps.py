"""Steps of compressed optimizers: schedules, numbers in tensors, options that change, 16 bits; compiled, and operation by
operation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fp8compile
from fp8compile import _torch as private
from fp8compile.numerics.states.split_weights import joined
from fp8compile.optim import captured_updates, compiled_step
from tests.support.compressing import (
    assert_same_way,
    compressed,
    formats,
    of_torch,
    parameters,
    shapes_for,
    values,
    with_gradients,
)
from tests.support.optim_bounds import U

STEPS, LR = 40, 1e-2
Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, LR, total_steps=STEPS + 1),  # changes betas or momentum too
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 10),  # the first step is by 0
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
}
KINDS = 2  # of shapes that a step is captured for: with two dimensions and with one; Muon's two matrices


class Counts:
    """How often a step is captured, and how many are compiled; what is compiled is run node by node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured = 0
        self._capture: Any = vars(captured_updates)["captured_update"]
        monkeypatch.setattr(captured_updates, "captured_update", self._counted)
        monkeypatch.setattr(compiled_step, "COMPILED", {})
        monkeypatch.setattr(private, "compile_fx_inner", lambda graph, *_, **__: lambda taken: graph(*taken))

    def _counted(self, *args: Any) -> Any:
        self.captured += 1
        return self._capture(*args)

    @property
    def compiled(self) -> int:
        return len(compiled_step.COMPILED)


def stepped(schedule: Any, step: int) -> None:
    """A plateau is at its 6th step."""
    schedule.step(*([1 / min(step + 1, 5)] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("is_made_before", [True, False], ids=["made before", "made behind"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_followed_and_nothing_is_captured_or_compiled_again(
    name: str, is_made_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, plain = of_torch("AdamW", lr=LR)
    ours, optimizer = of_torch("AdamW", lr=LR)
    counts, before, seen = Counts(monkeypatch), values(ours), list[tuple[int, int]]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler's, that no step was called before its own
        schedules = [SCHEDULES[name](plain)]
        schedules += [SCHEDULES[name](optimizer)] if is_made_before else []
        fp8compile.optim.compress(optimizer, "fp32")
        schedules += [] if is_made_before else [SCHEDULES[name](optimizer)]
        for step in range(STEPS):
            with_gradients(step, ours, theirs)
            for each in (plain, optimizer):
                each.step()
            for schedule in schedules:
                stepped(schedule, step)
            seen.append((counts.captured, counts.compiled))
            if optimizer.param_groups[0]["lr"] == 0 and step == 0:
                assert all(map(torch.equal, ours, before)), "a rate of 0 moves nothing, and gives no NaN"
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"]
    assert_same_way(ours, theirs, before, STEPS)
    # A scheduler that is made behind compress puts numbers of its own into groups. The step may be captured again for these,
    # for a rate of 0, of which more is proven, and for the first one above it.
    times = (not is_made_before) + (3 if name == "LambdaLR" else 1)
    assert seen[-1][0] <= times * KINDS and {*seen[1:]} == {(seen[-1][0], 1)}


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "NAdam", "SGD", "Muon"])
def test_so_are_those_of_optimizers_with_other_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASGD and Rprop have states that begin as the learning rate of their first step."""
    counts = Counts(monkeypatch)
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    (theirs, plain), (ours, optimizer) = of_torch(name, lr=LR, **options), compressed(name, "fp32", lr=LR, **options)
    before, schedules = values(ours), [lr_scheduler.LinearLR(each, 0.1, 1.0, 10) for each in (plain, optimizer)]
    for step in range(10):
        with_gradients(step, ours, theirs)
        if step < 4:  # its state begins when the learning rate is another
            ours[0].grad = theirs[0].grad = None
        for each in (plain, optimizer, *schedules):
            each.step()
    if name != "Muon":  # an ulp of a momentum may be another BF16 number, which its products spread
        assert_same_way(ours, theirs, before, 10)
    assert ours[0].isfinite().all() and not torch.equal(ours[0], before[0])
    assert counts.captured <= 2 * KINDS, "once more for the schedule, which is made behind compress"


CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.0}, {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0}, {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}, {"weight_decay": 0.0}),
    ("AdamW", {}, {"betas": (0.5, 0.9), "eps": 1e-3}),
    ("AdamW", {}, {"maximize": True}),
    ("AdamW", {"lr": 1}, {"lr": 0.1}),
    ("AdamW", {"lr": torch.tensor(0.5)}, {"lr": 0.1}),
    ("SGD", {}, {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9}, {"nesterov": True}),
    ("SGD", {"momentum": 0.9}, {"momentum": 0}),
    ("SGD", {"momentum": 0.9}, {"dampening": 0.5}),
    ("Rprop", {}, {"step_sizes": (1e-5, 0.02)}),
]


@pytest.mark.parametrize(("name", "options", "changed"), CHANGES)
def test_an_option_that_changes_between_steps_is_followed(
    name: str, options: dict[str, Any], changed: dict[str, Any]
) -> None:
    (theirs, plain), (ours, optimizer) = of_torch(name, **options), compressed(name, "fp32", **copy.deepcopy(options))
    before = values(ours)
    for step in range(6):
        if step == 3:
            for each in (plain, optimizer):
                each.param_groups[0].update(changed)
        with_gradients(step, ours, theirs)
        plain.step()
        optimizer.step()
    assert_same_way(ours, theirs, before, 6)


BECOME_EXACT: list[tuple[str, dict[str, Any], dict[str, Any], str, float]] = [
    ("AdamW", {}, {"amsgrad": True}, "exp_avg_sq", 0.999),
    ("SGD", {"momentum": 0.9}, {"momentum": 1.0}, "momentum_buffer", 1.0),
]


@pytest.mark.parametrize(("name", "options", "changed", "state", "kept"), BECOME_EXACT)
def test_states_that_have_to_be_exact_from_now_on_go_on_as_they_are(
    name: str, options: dict[str, Any], changed: dict[str, Any], state: str, kept: float
) -> None:
    """Without a gradient a step leaves the decoded values, times what it keeps of them."""
    ours, optimizer = compressed(name, **options)
    for step in range(3):
        with_gradients(step, ours)
        optimizer.step()
    decoded = optimizer.export_fp32_state_dict()["state"]
    optimizer.param_groups[0].update(changed)
    for p in ours:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert formats(optimizer, state) == ["fp32"] * 3
    for p, before in zip(ours, decoded.values(), strict=True):
        torch.testing.assert_close(
            optimizer.state[p][f"{state}.fp32.value"], kept * before[state], rtol=4 * U, atol=0
        )


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "ASGD", "RAdam", "Rprop", "Muon"])
def test_a_rate_in_a_tensor_is_read_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, several = [torch.tensor(LR) for _ in range(2)], [parameters(shapes_for(name)) for _ in range(2)]
    ours, theirs = several
    optimizer, plain = (getattr(torch.optim, name)(ps, lr=rate) for ps, rate in zip(several, rates, strict=True))
    fp8compile.optim.compress(optimizer, "fp32", compiled=False)
    counts, start = Counts(monkeypatch), values(ours)
    for step in range(4):
        for rate in rates:
            rate.fill_(LR * step)
        with_gradients(step, ours, theirs)
        optimizer.step()
        plain.step()
        if step == 0 and name != "Rprop":  # whose rate is what its step sizes begin as, and these have a least one
            assert all(map(torch.equal, ours, start)), "by nothing at a rate of 0"
    if name != "Muon":
        assert_same_way(ours, theirs, start, 4)
    assert counts.captured == 0


def test_betas_in_tensors_are_read_at_every_step() -> None:
    """torch.optim takes powers of such betas in FP32, ours in FP64: 1 - beta**t is off by U beta**t t / (1 - beta**t)."""
    several, betas = [parameters() for _ in range(2)], [[torch.tensor(0.5), torch.tensor(0.75)] for _ in range(2)]
    ours, theirs = several
    optimizer, plain = (
        torch.optim.Adam(ps, lr=torch.tensor(LR), betas=tuple(each), foreach=False)  # type: ignore[arg-type]
        for ps, each in zip(several, betas, strict=True)
    )
    fp8compile.optim.compress(optimizer, "fp32", compiled=False)
    before = values(ours)
    for step in range(4):
        for each in betas:
            each[0].fill_(0.5 - step / 8)
        with_gradients(step, ours, theirs)
        optimizer.step()
        plain.step()
    assert_same_way(ours, theirs, before, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_of_16_bit_parameters_go_the_way_of_fp32(dtype: torch.dtype) -> None:
    """A master in FP32 goes bit for bit as a parameter in FP32 does, by the same gradients; a correction of 8 bits rounds it
    at each step to half of 2**-8 of an ulp of the weight."""
    mantissa, steps = 8 if dtype == torch.bfloat16 else 11, 3
    exact = [nn.Parameter(p.detach().float()) for p in parameters(dtype=dtype)]
    whole, cut = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizers: list[Any] = [
        fp8compile.optim.compress(torch.optim.AdamW(ps, lr=LR), "fp32", master=master, compiled=False)
        for ps, master in ((exact, "none"), (whole, "fp32"), (cut, "split"))
    ]
    for step in range(steps):
        with_gradients(step, whole, cut)
        for p, q in zip(exact, whole, strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for p, q, r in zip(exact, whole, cut, strict=True):
        assert torch.equal(optimizers[1].state[q]["master"], p) and torch.equal(q, p.to(dtype))
        correction = optimizers[2].state[r]["correction"]
        off = (joined(r.detach(), correction) - p).abs().detach()
        largest = 2 * p.abs().detach() + LR  # an ulp may be that of the next power of 2
        assert bool((off <= steps * 2.0 ** -(mantissa + 8) * largest).all())


def test_16_bit_parameters_train_without_masters_too() -> None:
    """Rounded to nearest, ones would stay where they are: an update is 2**-3 of an ulp."""
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = fp8compile.optim.compress(torch.optim.SGD([p], lr=1e-3, maximize=True), compiled=False)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert abs(float(p.detach().float().mean()) - 1.1) <= 2.0**-8


COMPILED: list[tuple[str, dict[str, Any], int]] = [
    ("AdamW", {}, 3),
    ("NAdam", {}, 3),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "lr": 0.1}, 0),
    ("RAdam", {"betas": (0.9, 0.9)}, 4),  # is rectified from its 6th step on
]


@pytest.mark.parametrize(
    ("name", "options", "eager", "fmt"),
    [
        pytest.param(*case, fmt, marks=() if case[0] == "NAdam" and fmt == "fp32" else pytest.mark.sweep)
        for case in COMPILED
        for fmt in ("fp32", "e4m3_expanded")
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_compiled_it_does_what_its_operations_do(name: str, options: dict[str, Any], eager: int, fmt: str) -> None:
    """Each step begins with the same parameters and states: a code that is rounded the other way is no ulp. Where some steps
    were torch's own, states that are there are taken up."""
    several = [parameters() for _ in range(2)]
    ours, theirs = several
    pair: list[Any] = [getattr(torch.optim, name)(ps, **options) for ps in several]
    for step in range(eager):
        with_gradients(step, *several)
        for each in pair:
            each.step()
    for each, compiled in zip(pair, (True, False), strict=True):
        fp8compile.optim.compress(each, fmt, compiled=compiled)
    for step in range(eager, eager + 3):
        with_gradients(step, *several)
        before = values(ours)
        for each in pair:
            each.step()
        assert_same_way(ours, theirs, before, 1)
        for p, q in zip(ours, theirs, strict=True):
            _synchronize(p, q, pair[0].state[p], pair[1].state[q])


@torch.no_grad()
def _synchronize(p: Tensor, q: Tensor, mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    p.copy_(q)
    for name, value in mine.items():
        if value.dim() == 0:  # one number
            assert abs(float(value) - float(other[name])) <= 2 * U * abs(float(value)), name
        value.copy_(other[name])
