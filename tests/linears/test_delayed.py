"""Delayed scaling in training: its history is the reference's, and it gets over a jump."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import Recipe
from fp8compile.linears import history
from fp8compile.numerics.delayed import PATIENCE
from tests.linears.plain import Plain
from tests.linears.reference import DelayedLinear
from tests.linears.training import DELAYED, LENGTH, data, own, steps_of, train
from tests.support.measure import compiled


class Net(nn.Module):
    """A graph break between a and b, and b in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.a(x))
        torch._dynamo.graph_break()
        y = y + checkpoint(lambda z: F.relu(self.b(z)), y, use_reentrant=False)
        out: Tensor = self.c(y)
        return out


def amaxes(model: nn.Module) -> dict[str, list[float]]:
    state = fp8compile.tools.scaling_state(model).state_dict()
    return {
        label: row.tolist()
        for graph in state["graphs"]
        for label, row in zip(graph["operands"], graph["amaxes"], strict=True)
    }


@pytest.mark.parametrize("micro", [1, 3])
def test_histories_are_the_reference_s_over_fifty_steps(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph break, a checkpoint, micro-batches; one compilation of each graph, whatever the history.

    Both get the same weights in each step, so that nothing adds up. Sums in another order may round one of 64 codes to its
    other neighbour, 1/8 away: that moves a result by some 0.2 %.
    """
    monkeypatch.setattr(history, "falls_back", lambda seen: torch.zeros(len(seen), dtype=torch.bool))
    torch.manual_seed(3)
    model = Net()
    plain = copy.deepcopy(model)
    for name in "abc":
        setattr(plain, name, DelayedLinear(getattr(plain, name), LENGTH))
    first, run = copy.deepcopy(model.state_dict()), compiled(model, **DELAYED, **{"linears.margin": 0})
    torch._dynamo.utils.counters.clear()
    losses: list[tuple[float, float]] = []
    for step in range(50):
        weights = {name: value * (1 + 0.3 * math.sin(step)) for name, value in first.items()}
        for each in (model, plain):
            each.load_state_dict(weights)
        for i in range(micro):
            pair = [(call(data(step, i)) - 1).square().mean() for call in (run, plain)]
            for loss in pair:
                loss.backward()
            losses.append((float(pair[0].detach()), float(pair[1].detach())))
    assert all(ours == pytest.approx(theirs, rel=5e-3) for ours, theirs in losses)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    found = amaxes(model)
    want = {f"{n}.{role}": h.amaxes for n in "abc" for role, h in getattr(plain, n).histories.items()}
    assert found.keys() == want.keys() and len(want) == 9
    for label, row in want.items():
        assert found[label] == pytest.approx(row, rel=5e-3), label


def test_generated_code_has_the_same_histories() -> None:
    found = []
    for codegen in ("eager", "inductor"):
        torch.manual_seed(3)
        torch._dynamo.reset()
        model = Plain()
        found.append((list(train(model, compiled(model, **DELAYED, **{"debug.codegen": codegen}), 6)), amaxes(model)))
    (losses, one), (others, other) = found
    assert losses == pytest.approx(others, rel=1e-3)
    assert one.keys() == other.keys() and len(one) == 6
    for label in one:
        assert one[label] == pytest.approx(other[label], rel=1e-2), label


def test_a_jump_is_seen_and_the_next_step_takes_its_own_scales() -> None:
    """A thousand times larger from one step to the next: clipped once, counted, then as exact as current scaling."""
    torch.manual_seed(3)
    model = Plain()
    run, optimizer = compiled(model, **DELAYED), torch.optim.SGD(model.parameters(), 0.0)

    def error(x: Tensor) -> float:
        exact = copy.deepcopy(model)
        loss, want = run(x).square().mean(), exact(x).square().mean()
        loss.backward()
        optimizer.step()
        return abs(float(loss.detach()) / float(want.detach()) - 1)

    assert [error(data(0)) < 0.05 for _ in range(3)] == [True] * 3
    each = own(model)
    assert not each.must_measure()
    assert error(1000 * data(0)) > 0.5, "a stale scale clips"
    assert each.must_measure()
    fell = {o.label: bool(f) for o, f in zip(each.operands, each.fell_back, strict=True)}
    assert fell["a.input"] and not fell["a.weight"] and not fell["b.weight"]
    assert error(1000 * data(0)) < 0.05, "the step that measures"
    assert error(1000 * data(0)) < 0.05 and not each.must_measure(), "and the one after it"
    told = str(fp8compile.tools.scaling_state(model))
    assert "a.input" in told and "fell back" in told


def test_a_clipped_backward_enlarges_no_other_one() -> None:
    torch.manual_seed(3)
    model = Plain()
    run, found = compiled(model, **DELAYED), list[float]()
    for factor in (1, 1, 1000, 1, 1):
        (factor * run(data(0)).square().mean()).backward()
        found.append(amaxes(model)["b.gradient"][0])
    assert found[2] == pytest.approx(1000 * found[0], rel=0.1)
    assert found[3:] == pytest.approx([found[0]] * 2, rel=0.1), "codes of b's input differ a little"


def test_who_clips_forgets_so_that_one_spike_does_not_stay() -> None:
    torch.manual_seed(3)
    model = Plain()
    run = compiled(model, **DELAYED)
    for x in (data(0), 1000 * data(0), data(0)):
        run(x).square().mean().backward()
    row = amaxes(model)["a.input"]
    assert row[0] == pytest.approx(float(data(0).abs().max())) and max(row) == pytest.approx(1000 * row[0])


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_batch_of_zeros_is_got_over(first: float) -> None:
    torch.manual_seed(3)
    model = Plain()
    losses = list(train(model, compiled(model, **DELAYED), 12, scale=lambda step: first if step == 0 else 0.5))
    assert all(loss == loss for loss in losses) and losses[-1] < losses[1]
    each = own(model)
    assert bool((each.inv_scales > 2.0**-126).all()), "all have seen a value"


class Dead(Plain):
    """b's input is zero whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.gate * F.gelu(self.a(x))) + self.a(x)[:, :32]
        return y


def test_a_dead_operand_does_not_keep_the_graph_from_known_scales() -> None:
    torch.manual_seed(3)
    model = Dead()
    with pytest.warns(UserWarning, match=r"b\.input.* had no value but 0 in"):
        losses = list(train(model, compiled(model, **DELAYED), PATIENCE + 3))
    each = own(model)
    assert not each.must_measure() and all(map(math.isfinite, losses))
    assert amaxes(model)["b.input"] == [0.0] * LENGTH


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_in_the_result_counted_and_forgotten(bad: float) -> None:
    torch.manual_seed(3)
    model = Plain()
    run = compiled(model, **DELAYED)
    for _ in range(2):
        run(data(0)).square().mean().backward()
    x = data(0)
    x[3, 5] = bad
    out = run(x)
    assert bool(out[3].isnan().all()) and bool(out[4].isfinite().all()), "the row that holds it, no other"
    out[4:].square().mean().backward()
    each = own(model)
    lost = {o.label: float(t) for o, t in zip(each.operands, each.totals[:, 1], strict=True)}
    assert lost["a.input"] == 1 and lost["b.input"] > 1
    assert all(value < 100 for row in amaxes(model).values() for value in row)
    assert bool(run(data(0)).isfinite().all())


def test_two_calls_in_one_backward_are_two_entries() -> None:
    """Autograd adds up the gradients of one leaf, and amaxes do not add up."""
    model = Plain()
    run = compiled(model, **DELAYED)
    (run(data(0)).sum() + run(2 * data(0)).sum()).backward()
    amax = float(data(0).abs().max())
    assert sorted(amaxes(model)["a.input"][:2]) == [amax, 2 * amax] and own(model).entries == 2


def test_batches_of_other_sizes_share_one_graph_and_one_history() -> None:
    model = Plain()
    options = {"debug.codegen": "eager", **DELAYED}
    run = torch.compile(model, backend="fp8compile", options=options, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for rows in (24, 40, 17, 32):
        run(torch.ones(rows, 32)).square().mean().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert own(model).entries == 4 and amaxes(model)["a.input"] == [1.0] * LENGTH


@pytest.mark.parametrize("kind", ["check", "fp16", "autocast", "checkpoint around", "blocks"])
def test_it_goes_with_whatever_else_is_on(kind: str) -> None:
    """Every backward is an entry of each graph's history, and no step after the first measures."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Plain() for _ in range(2)))
    x, options = data(0).requires_grad_(), dict(DELAYED)
    if kind == "check":
        options["debug.check"] = "first_step"
    if kind == "fp16":
        model, x = model.half(), data(0).half()
    run: Any = compiled(model, **options)
    if kind == "checkpoint around":
        run = functools.partial(checkpoint, run, use_reentrant=False)
    if kind == "blocks":
        run = model
        for block in model:
            block.compile(backend="fp8compile", options={"debug.codegen": "eager", **options})
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            run(x).float().square().mean().backward()
    graphs = fp8compile.tools.scaling_state(model).graphs
    assert [(each.entries, each.must_measure()) for _, each in graphs] == [(3, False)] * (
        2 if kind == "blocks" else 1
    )
    labels = [label for labels, _ in graphs for label in labels]
    assert sorted(labels) == sorted(
        f"{i}.{n}.{r}" for i in "01" for n in "ab" for r in ("input", "weight", "gradient")
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"linears.scaling": "delay"}, "Did you mean 'delayed'"),
        ({"linears.scaling": "delayed", "linears": "rowwise"}, "one scale per tensor"),
        ({"linears.amax_history_len": 0}, "from 1 to 1024, not 0"),
        ({"linears.margin": 1.5}, "from 0 to 8, not 1.5"),
    ],
)
def test_recipes_say_what_they_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Recipe(**changes)


def test_without_fp8_linears_it_is_remarked_on() -> None:
    model = Plain()
    compiled(model, linears="off", **{"linears.scaling": "delayed"})(data(0)).mean().backward()
    assert any("linears.scaling='delayed' has no effect" in remark for remark in fp8compile.report(model).remarks)


def test_the_report_tells_of_each_operand_and_each_matmul() -> None:
    model = Plain()
    steps_of(model, 1)
    report = fp8compile.report(model)
    assert {linear.formats for linear in report.linears} == {
        "e4m3 x e4m3 delayed, emulated",
        "e5m2 x e4m3 delayed, emulated",
    }
    assert sorted(o.label for o in report.notes.operands) == sorted(amaxes(model))


def test_a_model_in_inference_and_one_without_a_backward_compute_as_ever() -> None:
    model = Plain()
    run = compiled(model, **DELAYED)
    with torch.no_grad():
        assert torch.allclose(run(data(0)), model(data(0)), atol=1e-6)
    assert not fp8compile.tools.scaling_state(model).graphs
