"""Counts by hooks against gradients that autograd.grad gives, micro-batch by micro-batch; and what hooks must not do."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8compile.amp import LossScaler, watch
from fp8compile.observe.records import StatisticsRow, of_model, of_parameters
from tests.support.amp_models import batch, counted, loss_of, net, sgd, train


class Net(nn.Module):
    """A weight used twice, a functional operation between modules, an in-place module, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.act, self.down = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 4),
        )
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.mid(self.mid(F.gelu(self.up(x))))) * 64)  # type: ignore[no-any-return]


def by_hand(model: Net, x: Tensor, scale: float) -> dict[tuple[str, str], list[Tensor]]:
    """Gradients of all that ``watch`` sees, by (module, op), from a forward written out."""
    a = model.up(x)
    b = F.gelu(a)
    c = model.mid(b)
    d = model.mid(c)
    e = F.relu(d)
    f = e * 64
    out = model.down(f)
    loss = out.float().pow(2).mean() * scale
    values = {"up": [a], "mid.input": [b], "mid": [c, d], "act": [e], "down.input": [f], "down": [out]}
    ops = {"up": "Linear", "mid": "Linear", "act": "ReLU", "down": "Linear"}
    tensors = [t for each in values.values() for t in each]
    wanted = [*tensors, *model.parameters()]
    gradients = dict(zip(map(id, wanted), torch.autograd.grad(loss, wanted), strict=True))
    found = {}
    for name, each in values.items():
        path, _, way = name.partition(".")
        found[path, ops[path] + ("." + way if way else "")] = [gradients[id(t)] for t in each]
    for name, p in model.named_parameters():
        found[name, "Linear"] = [gradients[id(p)]]
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 2.0**-18, 2.0**12])
def test_counts_are_those_of_autograd(micro_batches: int, scale: float) -> None:
    torch.manual_seed(0)
    model = Net()
    seen = watch(model)
    xs = [batch(i, rows=5 + i) for i in range(micro_batches)]
    for x in xs:
        (loss_of(model, x) * scale).backward()
    current = dict(zip(seen.rows, seen.current.tolist(), strict=True))
    expected: dict[tuple[str, str], list[Tensor]] = {}
    for x in xs:
        for key, several in by_hand(model, x, scale).items():
            expected.setdefault(key, []).extend(several)
    backward = {(row.module, row.op): numbers for row, numbers in current.items() if row.direction == "backward"}
    assert backward == {key: counted(several) for key, several in expected.items()}
    seen.close(1)
    assert not seen.current.any() and seen.history[-1][0] == 1
    if scale == 2.0**12:
        assert sum(numbers[2] for numbers in backward.values()) > 0  # some are inf
    if scale == 2.0**-18:
        assert sum(numbers[5] for numbers in backward.values()) > 0  # some are subnormal


def test_rows_say_what_they_are() -> None:
    model = net()
    seen = watch(model)
    loss_of(model, batch(0)).backward()
    assert StatisticsRow("2.weight", "", "Linear", "weight", "backward", "f16") in seen.rows
    assert StatisticsRow("1", "", "Tanh", "activation", "backward", "f16") in seen.rows
    assert StatisticsRow("0", "", "Linear", "activation", "forward", "f16") in seen.rows
    assert StatisticsRow("", "", "input", "data", "forward", "f16") in seen.rows
    assert of_model(model) == [seen] and of_parameters([model[0].weight]) == [seen]


def test_saturation_is_off_until_a_histogram_scaler_binds() -> None:
    for mode, clipped in (("histogram", True), ("dynamic", False), ("static", False)):
        model = net()
        watch(model)
        scaler = LossScaler(mode, init_scale=1.0, collapse=False)
        train(scaler, model, sgd(model, 0.0), [0])
        model.zero_grad()
        (model(batch(0)).float().sum() * 2.0**17).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters()) == clipped  # type: ignore[union-attr]


def test_remove_takes_everything_off() -> None:
    model = net()
    seen = watch(model)
    loss_of(model, batch(0)).backward()
    before = seen.current.clone()
    seen.remove()
    loss_of(model, batch(1)).backward()
    assert torch.equal(before, seen.current)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not model[0].weight._backward_hooks


def test_kinds_and_modules() -> None:
    model = net()
    seen = watch(model, kinds=("weight",), modules=("2",))
    loss_of(model, batch(0)).backward()
    assert {(row.module, row.kind) for row in seen.rows if row.direction == "backward"} == {
        ("2.weight", "weight"),
        ("2.bias", "weight"),
    }
    with pytest.raises(ValueError, match="kinds="):
        watch(model, kinds=("weights",))
    with pytest.raises(ValueError, match="compiled model"):
        watch(torch.compile(model))  # type: ignore[arg-type]


def test_an_evaluation_is_not_seen() -> None:
    model = net()
    seen = watch(model)
    with torch.no_grad():
        model(batch(0))
    assert seen.rows == ()


def test_late_rows_fit_the_history() -> None:
    model = net()
    seen = watch(model)
    model[0](batch(0)).float().sum().backward()
    rows = len(seen.rows)
    seen.close()
    loss_of(model, batch(0)).backward()
    seen.close()
    assert len(seen.rows) > rows and {len(numbers) for _, numbers in seen.history} == {len(seen.rows)} == {
        len(seen.first)
    }


def test_results_are_those_without_hooks() -> None:
    torch.manual_seed(0)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    watch(ours)
    for model in (ours, theirs):
        loss_of(model, batch(0)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))  # type: ignore[arg-type]


def test_sparse_weight_gradients() -> None:
    table = nn.Embedding(10, 4, sparse=True).half()
    seen = watch(table)
    seen.saturate(True)
    (table(torch.tensor([1, 1, 3])).float().sum() * 40000).backward()
    (numbers,) = [n for row, n in zip(seen.rows, seen.current.tolist(), strict=True) if row.kind == "weight"]
    assert numbers[:3] == [0, 4, 4] and numbers[6] == 40000  # row 1 is a sum that overflowed
    assert table.weight.grad is not None and table.weight.grad.to_dense().max() == 65504


def test_nothing_is_kept_alive() -> None:
    model = net()
    watch(model)
    scaler = LossScaler()
    train(scaler, model, sgd(model), [0])
    assert len(scaler.observations) == 1
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and scaler.observations == []


def test_a_scaler_that_is_gone_lets_go() -> None:
    model = net()
    seen = watch(model)
    scaler = LossScaler()
    train(scaler, model, sgd(model), [0])
    assert seen.scaled and seen.saturates
    del scaler
    gc.collect()
    assert not seen.scaled and not seen.saturates
