"""A whole step against the three calls that it stands for: numbers, states, how often it compiles, what it leaves.

With ``debug.codegen="eager"`` both run the same operations, so results must be equal bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile

EAGER = {"linears": "off", "saved": "off", "debug.codegen": "eager"}
STEPS = 20
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices, biases, a tied weight, dropout, a batch norm with buffers, and a parameter that nothing reads."""

    def __init__(self, width: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.norm(x + self.drop(F.gelu(layer(x))))
        return x @ self.embed.weight.t()


def loss_fn(model: nn.Module, tokens: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(tokens)
    return F.cross_entropy(logits, words), logits


def batches(n: int = STEPS, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, 8, (2, size), generator=generator)) for _ in range(n)]  # type: ignore[misc]


def net(**options: Any) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Net(**options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return fp8compile.optim.AdamW(model, lr=1e-2, compiled=False)


def whole_precision(model: nn.Module) -> torch.optim.Optimizer:
    return fp8compile.optim.AdamW(model, lr=1e-2, state_format="fp32", compiled=False)


MAKERS: dict[str, Make] = {
    "adamw": adamw,
    "lion": lambda model: fp8compile.optim.Lion(model, lr=1e-3, compiled=False),
    "sgd": lambda model: fp8compile.optim.SGD(
        model, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, compiled=False
    ),
    "adamw ascending": lambda model: fp8compile.optim.AdamW(model, lr=1e-3, maximize=True, compiled=False),
    "torch's nadam, compressed": lambda model: fp8compile.optim.compress(
        torch.optim.NAdam(model.parameters(), lr=1e-2),
        model=model,
        overrides={"layers.*.weight": "e4m3_expanded"},
        compiled=False,
    ),
}


def three_calls(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = None) -> Callable[..., Any]:
    compiled = torch.compile(lambda *batch: loss_fn(model, *batch), backend="fp8compile", options=EAGER)

    def step(*batch: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = compiled(*batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), logits.detach()

    return step


def same_states(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> bool:
    ours, other = (optimizer.state_dict()["state"] for optimizer in (mine, theirs))
    return all(torch.equal(ours[key][name], value) for key in other for name, value in other[key].items())


def same_model(mine: nn.Module, theirs: nn.Module) -> bool:
    other = theirs.state_dict()
    return all(torch.equal(value, other[name]) for name, value in mine.state_dict().items())


@pytest.mark.parametrize("maker", MAKERS)
def test_it_equals_the_three_calls_bit_for_bit_over_a_schedule(maker: str) -> None:
    if torch.__version__ < "2.12":
        pytest.skip("graphs take addcmul and addcdiv apart there: two roundings, where the operators have one")
    mine, theirs = (copy.deepcopy(each) for each in [net(layers=2)] * 2)
    optimizers = [MAKERS[maker](model) for model in (mine, theirs)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda n: 1 / (1 + n % 7)) for each in optimizers]
    step = fp8compile.train_step(mine, loss_fn, optimizers[0], recipe=EAGER, fallback=False)
    other = three_calls(theirs, optimizers[1])
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)  # of the dropout
        loss, logits = step(*batch)
        torch.manual_seed(number)
        expected, expected_logits = other(*batch)
        assert torch.equal(loss, expected), number
        assert torch.equal(logits, expected_logits)
        assert not loss.requires_grad
        assert all(p.grad is None for p in mine.parameters())
        for schedule in schedules:
            schedule.step()
    assert same_model(mine, theirs), "parameters, and the batch norm's buffers"
    assert same_states(*optimizers)
    assert step.summary.compilations == 1, "one graph, whatever the learning rate"
    assert step.summary.is_one_graph
    assert (step.summary.updated, step.summary.parameters) == (7, 8), "one parameter is not read"


@pytest.mark.filterwarnings("error:Detected call of")
def test_schedulers_are_told_that_the_optimizer_has_stepped() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER, fallback=False)(*batches(1)[0])
    schedule.step()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_stock_optimizers_have_the_arithmetic_and_states_of_ours(kind: str) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1} | ({"momentum": 0.9, "dampening": 0.2} if kind == "SGD" else {})
    mine, theirs = (copy.deepcopy(each) for each in [net()] * 2)
    stock = getattr(torch.optim, kind)(mine.parameters(), **options)
    ours = getattr(fp8compile.optim, kind)(theirs.parameters(), state_format="fp32", compiled=False, **options)
    steps = [
        fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER, fallback=False)
        for model, optimizer in ((mine, stock), (theirs, ours))
    ]
    for number, batch in enumerate(batches(5)):
        for step in steps:
            torch.manual_seed(number)
            step(*batch)
    assert same_model(mine, theirs)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        for name, value in stock.state[p].items():
            assert torch.equal(value, ours.state[q].get(f"{name}.fp32.value", ours.state[q].get("step"))), name
    assert all(set(stock.state[p]) == set(_torchs_own_state(kind)) for p in mine.parameters() if p is not mine.unread)


def _torchs_own_state(kind: str) -> dict[str, Any]:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = getattr(torch.optim, kind)([p], lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    optimizer.step()
    return dict(optimizer.state[p])


def test_a_stock_step_is_as_near_to_float64_as_torchs_own() -> None:
    """Of two roundings of one formula neither may be far worse: at most twice the other's error, and one unit."""
    start, data = net(), batches(8)
    start.drop.p = 0.0
    found = {}
    for arm in ("float64", "torch", "whole"):
        torch._dynamo.reset()
        model = copy.deepcopy(start).to(torch.float64 if arm == "float64" else torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step: Any = (
            fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER)
            if arm == "whole"
            else _eager(model, optimizer)
        )
        for batch in data:
            step(*batch)
        found[arm] = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    errors = {arm: (found[arm] - found["float64"]).norm() for arm in ("torch", "whole")}
    assert errors["whole"] <= 2 * errors["torch"] + torch.finfo(torch.float32).eps


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    def step(*batch: Tensor) -> None:
        loss_fn(model, *batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_clipping_is_torchs_and_its_norm_is_told() -> None:
    """A sum of n squares is off by n units at most, in any order; so are the coefficient and the change that it scales."""
    mine, theirs = (copy.deepcopy(each) for each in [net()] * 2)
    before = [p.detach().clone() for p in mine.parameters()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (mine, theirs)]
    step = fp8compile.train_step(mine, loss_fn, optimizers[0], recipe=EAGER, clip_norm=0.5, fallback=False)
    other = three_calls(theirs, optimizers[1])
    (batch,) = batches(1)
    torch.manual_seed(0)
    step(*batch)
    torch.manual_seed(0)
    other(*batch)
    assert step.grad_norm is not None
    changes = [
        (p - q).detach() for p, q in zip(theirs.parameters(), before, strict=True)
    ]  # those of rate 1 are gradients
    norm = torch.stack([change.norm() for change in changes]).norm()
    units = sum(change.numel() for change in changes) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(step.grad_norm, norm, rtol=units, atol=0.0)
    assert norm > 0.5, "something is clipped"
    for p, start, change in zip(mine.parameters(), before, changes, strict=True):
        expected = start + change * (0.5 / (norm + 1e-6))
        torch.testing.assert_close(p.detach(), expected, rtol=units, atol=units * float(change.abs().max()))
    assert step.summary.gradient_peak == step.summary.gradient_bytes, "all are alive when their norm is known"


def test_gradients_accumulate_over_calls() -> None:
    mine, theirs = (copy.deepcopy(each) for each in [net()] * 2)
    optimizers = [MAKERS["lion"](model) for model in (mine, theirs)]
    step = fp8compile.train_step(mine, loss_fn, optimizers[0], recipe=EAGER, fallback=False)
    compiled = torch.compile(lambda *batch: loss_fn(theirs, *batch), backend="fp8compile", options=EAGER)
    data = batches(6)
    for number, (first, second) in enumerate(zip(data[::2], data[1::2], strict=True)):
        torch.manual_seed(number)
        step.accumulate(*first)
        step(*second)
        torch.manual_seed(number)
        for batch in (first, second):
            compiled(*batch)[0].backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert same_model(mine, theirs)
    assert step.summary.compilations == 1
    step(*data[0])
    assert step.summary.compilations == 2, "without gradients from earlier calls it is another graph"
    assert step.summary.is_one_graph


def test_a_state_dict_goes_to_torch_optim_and_back() -> None:
    data = batches(6)
    model = net()
    model.drop.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER, fallback=False)
    for batch in data[:3]:
        step(*batch)
    other = copy.deepcopy(model)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())
    _eager(other, theirs)(*data[3])
    assert {float(state["step"]) for state in theirs.state.values()} == {4.0}
    before = step.summary.compilations
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    kept = copy.deepcopy(list(model.parameters()))
    step(*data[4])
    assert all(map(torch.equal, model.parameters(), kept)), "the rate of the group that was loaded counts"
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
    assert step.summary.compilations == before, "states that are laid out alike need no new code"


def test_a_parameter_group_that_is_added_is_trained_from_then_on() -> None:
    model = net()
    optimizer = fp8compile.optim.AdamW(model.layers.parameters(), lr=1e-2, compiled=False)
    step = fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER, fallback=False)
    before = model.embed.weight.detach().clone()
    step(*batches(1)[0])
    assert torch.equal(model.embed.weight, before), "it is not the optimizer's"
    assert model.embed.weight.grad is None
    optimizer.add_param_group({"params": [model.embed.weight]})
    step(*batches(1)[0])
    assert not torch.equal(model.embed.weight, before)


def test_options_that_change_the_arithmetic_are_followed() -> None:
    model = net()
    optimizer = whole_precision(model)
    step = fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER, fallback=False)
    step(*batches(1)[0])
    optimizer.param_groups[0]["maximize"] = True
    step(*batches(1)[0])
    assert step.summary.compilations == 2


def test_batches_of_other_sizes_are_trained_on() -> None:
    mine, theirs = (copy.deepcopy(each) for each in [net()] * 2)
    optimizers = [MAKERS["lion"](model) for model in (mine, theirs)]
    step = fp8compile.train_step(mine, loss_fn, optimizers[0], recipe=EAGER, fallback=False)
    other = three_calls(theirs, optimizers[1])
    for number, size in enumerate((12, 7, 9, 12)):
        torch.manual_seed(number)
        loss, _ = step(*batches(1, size)[0])
        torch.manual_seed(number)
        assert torch.equal(loss, other(*batches(1, size)[0])[0]), size
    assert same_model(mine, theirs)
    assert step.summary.compilations == 2, "one for the first size, one for all"


def test_a_result_in_a_parameters_memory_is_what_it_was_before_the_update() -> None:
    model = net()
    before = model.embed.weight.detach().clone()
    step = fp8compile.train_step(
        model, lambda m, x, y: (loss_fn(m, x, y)[0], m.embed.weight.t()), whole_precision(model), recipe=EAGER
    )
    _, seen = step(*batches(1)[0])
    assert step.summary.is_one_graph
    assert torch.equal(seen, before.t())
    assert not torch.equal(model.embed.weight, before)


def test_versions_count_what_generated_code_writes() -> None:
    model = net()
    step = fp8compile.train_step(model, loss_fn, whole_precision(model), recipe=EAGER, fallback=False)
    step(*batches(1)[0])
    versions = [p._version for p in model.layers.parameters()] + [model.norm.running_mean._version]
    step(*batches(1)[0])
    after = [p._version for p in model.layers.parameters()] + [model.norm.running_mean._version]
    assert all(new > old for new, old in zip(after, versions, strict=True))


def test_the_report_tells_of_the_step_and_of_its_graph() -> None:
    model = net(width=64)
    step = fp8compile.train_step(
        model,
        loss_fn,
        whole_precision(model),
        recipe={"linears": "off", "debug.codegen": "eager", "saved.min_numel": 0},
    )
    with pytest.raises(ValueError, match="call it with a batch first"):
        fp8compile.report(step)
    step(*batches(1, 64)[0])
    report = fp8compile.report(step)
    (graph,) = report.graphs
    assert graph.saved_bytes < graph.saved_bytes_plain
    assert graph.remarks[0].startswith("forward, backward and update are one graph, compiled 1 time")
    assert "are alive at one time" in graph.remarks[1]
    assert "one graph" in str(report)


def test_each_step_has_code_of_its_own_for_dynamo() -> None:
    """Were it one code object for all steps, more of them than Dynamo's limit would end in an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (8, 16, 24):
            model = nn.Linear(width, 1)
            step = fp8compile.train_step(
                model, lambda m, x: m(x).square().mean(), whole_precision(model), recipe=EAGER, fallback=False
            )
            step(torch.ones(4, width))
            assert step.summary.compilations == 1
