"""The scaler sees every gradient: those made in nested graphs, and those beyond the rows of the statistics input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import optim
from fp8compile.amp import LossScaler
from fp8compile.amp.histogram import Counter
from fp8compile.fx.aot import BACKWARD, FORWARD
from fp8compile.numerics.histogram import AMAX, EDGE, fold, statistics
from fp8compile.observe import records, slot
from fp8compile.observe.records import REST
from fp8compile.passes.observe_gradients import TOO_MANY_VALUES
from fp8compile.reporting.entries import OBSERVED
from tests.support.watched import EXACT, Net, batches, loss_of


class Block(nn.Module):
    """Six linears: with fewer than a call each, the statistics input would have too few rows."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Deep(nn.Module):
    """Three blocks of which the last ones have the largest gradients: 1.2**18 times those of the first."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, self.blocks = checkpointed, nn.ModuleList(Block() for _ in range(3))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 1.2)
        with torch.no_grad():
            next(self.parameters()).mul_(1e-4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.float().sum()


def rows_of(model: nn.Module) -> dict[tuple[str, str, str], list[list[float]]]:
    """What was counted, by module, op and direction; of the running step."""
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    for each in records.of_model(model):
        for row, stats in zip(each.rows, each.current.tolist(), strict=True):
            found.setdefault((row.module, row.op, row.direction), []).append(stats)
    return found


def test_checkpointed_layers_are_counted_as_others_are() -> None:
    x = (torch.randn(64, 32) * 300).half()
    counted = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Deep(checkpointed).half()
        run = torch.compile(model, backend="fp8compile", options=EXACT)
        (run(x) * 2.0**4).backward()
        counted.append(rows_of(model))
        assert not [s for s in fp8compile.report(run).skips if s.reason == TOO_MANY_VALUES]
    weights = [{key: of[key] for key in of if key[0].endswith(("weight", "bias"))} for of in counted]
    assert len(weights[0]) == 36 and weights[0] == weights[1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_scaled_gradient_beyond_the_edge(checkpointed: bool) -> None:
    """The scale is halved for each gradient above 2**13, wherever it is made. Doubled once more, it may have passed it."""
    torch.manual_seed(0)
    model = Deep(checkpointed).half()
    run = torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager"})
    optimizer, scaler = optim.AdamW(model.named_parameters(), lr=0.0, compiled=False), LossScaler(init_scale=2.0**6)
    x = (torch.randn(512, 32) * 300).half()
    for _ in range(12):
        scaler.scale(run(x)).backward()
        largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 0 < largest <= EDGE and scaler.get_scale() < 2.0**6
    assert sum(row.kind == "weight" for each in scaler.observations for row in each.rows) == 36


def test_autocast_inside_a_checkpoint_alone_is_observed() -> None:
    """All that is FP16 stands in the nested graph."""

    class Cast(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return super().forward(x).float()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Cast()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y

    model = Outer()
    torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager"})(
        batches(32)[0].float()
    ).sum().backward()
    [seen] = records.of_model(model)
    assert {"f16"} == {row.dtype for row in seen.rows} and BACKWARD in {row.direction for row in seen.rows}


def test_one_call_of_many_operations_has_a_line_for_each() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).half()
    run = torch.compile(model, backend="fp8compile", options=EXACT)
    x = torch.randn(2, 8, 32).half()
    run(x, x, x)[0].float().sum().backward()
    assert not fp8compile.report(run).notes.skipped(OBSERVED) and not [
        r for o in records.of_model(model) for r in o.rows if r.op == REST
    ]


def test_gradients_beyond_the_rows_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 rows two are shared, by kind: all that a graph with enough of them counts is in them."""
    model = Net().half()
    narrow, seen = copy.deepcopy(model), []
    for each, spare in ((model, 64), (narrow, 0)):
        torch._dynamo.reset()
        monkeypatch.setattr(slot, "SPARE", spare)
        monkeypatch.setattr(slot, "calls_of", lambda gm: 0)  # rows for the 5 inputs alone
        run = torch.compile(each, backend="fp8compile", options=EXACT)
        loss_of(run, *batches(32), 2.0**12).backward()
        seen += records.of_model(each)
    whole, short = seen
    assert len(short.rows) == 5 and [row.op for row in short.rows].count(REST) == 2
    assert {s.reason for s in fp8compile.report(run).notes.skipped(OBSERVED)} == {TOO_MANY_VALUES}  # of the forward
    for kind in ("weight", "activation"):
        totals = []
        for each in (whole, short):
            stats = torch.zeros_like(each.current[0])
            for row, counts in zip(each.rows, each.current, strict=True):
                if row.direction == BACKWARD and row.kind == kind:
                    stats = fold(stats, counts)
            totals.append(stats.tolist())
        assert totals[0] == totals[1] and totals[0][AMAX] > 0
    both = [Counter(("weight", "activation"), ("*",)).of_rows(each, each.current).tolist() for each in seen]
    assert both[0] == both[1]
    chosen = Counter(("weight",), ("up",)).of_rows(short, short.current)
    assert chosen.sum() == sum(p.numel() for p in model.parameters()), "what may be up's counts as up's"


def test_what_is_folded_is_what_eager_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().half()
    monkeypatch.setattr(slot, "SPARE", 0)
    monkeypatch.setattr(slot, "calls_of", lambda gm: 0)
    run = torch.compile(model, backend="fp8compile", options=EXACT)
    loss_of(run, *batches(32), 2.0**12).backward()
    [seen] = records.of_model(model)
    expected = torch.zeros(len(seen.current[0]), dtype=torch.float64)
    for p in model.parameters():
        assert p.grad is not None
        expected = fold(expected, statistics(p.grad))
    found = [counts for row, counts in zip(seen.rows, seen.current, strict=True) if row.kind == "weight"]
    assert len(found) == 1 and found[0].tolist() == expected.tolist()
    assert {row.direction for row in seen.rows} == {FORWARD, BACKWARD}
