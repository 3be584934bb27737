"""A captured step's two parts, elements and numbers, compute what torch.optim's own step does, one tensor at a time."""

from __future__ import annotations

import re

import expecttest
import pytest
import torch
from torch import Tensor, nn

from fp8compile.optim.captured_update import CapturedUpdate
from tests.support.captured import CASES, SHAPE, at_step, of_torch, update_of
from tests.support.within import U, Within, exactly, within

STEPS = (1, 2, 7, 1000)
ELEMENTWISE = [label for label in CASES if label != "Muon"]


class TestAdamW(expecttest.TestCase):
    def test_elements(self) -> None:
        code = update_of(of_torch("AdamW")).code
        lines = [re.sub(r"torch\.ops\.|;.*", "", line).strip() for line in code.splitlines()]
        self.assertExpectedInline(
            "\n".join(filter(None, lines)),
            """\
def forward(self, p, g, state0, state1, n0, n1, n2, n3, n4, n5, n6, n7):
mul_1 = aten.mul.Tensor(p, n0)
mul_tensor = aten.mul.Tensor(state0, n1)
addcmul_default = aten.addcmul.default(mul_tensor, g, n2)
mul_2 = aten.mul.Tensor(state1, n3)
mul_3 = aten.mul.Tensor(g, g)
addcmul = aten.addcmul.default(mul_2, mul_3, n4)
sqrt = fp8compile.near_sqrt.default(addcmul)
mul_6 = aten.mul.Tensor(sqrt, n5)
add_1 = aten.add.Tensor(mul_6, n6)
div = fp8compile.near_quotient.default(addcmul_default, add_1)
addcmul_1 = aten.addcmul.default(mul_1, n7, div)
return [addcmul_1, addcmul_default, addcmul]""",
        )


def test_numbers_of_adamw_s_step() -> None:
    """Eight, each computed once for all elements: what they are in Python's double."""
    update = update_of(of_torch("AdamW"))
    lr, (beta1, beta2), eps, decay, step = 0.1, (0.9, 0.999), 1e-8, 0.01, 7
    rest1, rest2 = 1 - beta1**step, 1 - beta2**step
    expected = (1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, 1 / rest2**0.5, eps, -lr / rest1)
    row, new = at_step(update, of_torch("AdamW").param_groups[0], step, {})
    assert update.names == tuple(f"n{i}" for i in range(8)) and new == []
    torch.testing.assert_close(row[:8], torch.tensor(expected), rtol=2 * U, atol=0)  # FP32's rounding alone


def states_at(update: CapturedUpdate, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Some states of that step, and its one-number states: those at the beginning, or random ones."""
    if step == 1:
        wide = {name: torch.full(SHAPE, update.initial[name]) for name in update.states}
        return wide, {name: torch.tensor(update.initial[name]) for name in update.singles}
    signed = {True: lambda: torch.rand(SHAPE) - 0.5, False: lambda: torch.rand(SHAPE) + 0.5}
    wide = {name: signed[sign]() for name, sign in update.states.items()}
    return wide, {name: torch.rand(()) * 0.5 + 0.25 for name in update.singles}


def torch_step(
    label: str, p: Tensor, g: Tensor, states: dict[str, Tensor], step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """What torch.optim makes of these, in their dtype."""
    q = nn.Parameter(p.clone())
    q.grad = g.clone()
    optimizer = of_torch(label, [q])
    if step > 1 or not label.startswith(("SGD", "ASGD", "Rprop")):  # these begin by the gradient, or by a number
        optimizer.state[q] = {"step": torch.tensor(step - 1.0)} | {
            name: each.clone() for name, each in states.items()
        }
    optimizer.step()
    return q.detach(), optimizer.state[q]


def narrow(bounds: Within, begin: Tensor | float) -> bool:
    """Whether the bounds say something: narrower than a thousandth of the way from the beginning."""
    way = (bounds.value - begin).abs().mean()
    return float((bounds.high - bounds.low).mean()) < 1e-3 * float(way)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("label", ELEMENTWISE)
def test_a_step_is_torchs(label: str, step: int) -> None:
    """torch.optim's step in FP64 is within bounds that hold every rounding of ours, beginning with those of the numbers of
    the step. In FP32 it rounds as often in another order: within as much again."""
    torch.manual_seed(step)
    update, group = update_of(of_torch(label)), of_torch(label).param_groups[0]
    p, g = torch.randn(SHAPE), torch.randn(SHAPE)
    g[0, 0] = 0.0
    states, singles = states_at(update, step)
    row, new = at_step(update, group, step, singles)
    row = row[: len(update.names)]
    n = [exactly(each).rounded(2) for each in row]  # FP32's own rounding; those of FP64 are far below
    found = within(update.elements, *map(exactly, (p, g, *states.values())), *n)
    given: dict[str, Tensor] = states | singles
    exact, kept = torch_step(label, p.double(), g.double(), {k: x.double() for k, x in given.items()}, step)
    plain, kept_plain = torch_step(label, p, g, given, step)
    ours, made = update(p, g, states, dict(zip(update.names, row, strict=True)))
    wanted = [(ours, exact, plain), *((made[name], kept[name], kept_plain[name]) for name in update.states)]
    assert all(narrow(bounds, 0.0 if i else p) for i, bounds in enumerate(found))
    for bounds, (mine, truth, theirs) in zip(found, wanted, strict=True):
        width = bounds.high - bounds.low
        assert bool(((bounds.low <= mine) & (mine <= bounds.high)).all())
        assert bool(((bounds.low <= truth) & (truth <= bounds.high)).all())
        assert bool(((bounds.low - width <= theirs) & (theirs <= bounds.high + width)).all())
    for name, value in zip(update.singles, new, strict=True):  # FP32 rounds a factor and the product
        assert abs(float(value) - float(kept_plain[name])) <= 2 * U * abs(float(value)), name


@pytest.mark.parametrize("step", STEPS)
def test_muon_s_step_is_torchs(step: int) -> None:
    """Of few bits, so that both orthogonalise the very same BF16 numbers; what follows is p (1 - lr wd) - lr f X."""
    torch.manual_seed(step)
    update, group = update_of(of_torch("Muon")), of_torch("Muon").param_groups[0]
    p, g, buffer = (torch.randint(-8, 9, SHAPE).float() for _ in range(3))
    row, _ = at_step(update, group, step, {})
    row = row[: len(update.names)]
    moved, new = update(p, g, {"momentum_buffer": buffer}, dict(zip(update.names, row, strict=True)))
    theirs, kept = torch_step("Muon", p, g, {"momentum_buffer": buffer}, step)
    assert torch.equal(new["momentum_buffer"], kept["momentum_buffer"])
    largest = p.abs() + 0.1 * 2  # no singular value that five steps make is above 2
    assert bool(((moved - theirs).abs() <= 4 * U * largest).all()), "a product and a sum, in each"
