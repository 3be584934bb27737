"""overflow_report: what it names, in which order, what it counts, what it draws; on real graphs and on rows set by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.fx.aot import BACKWARD, FORWARD
from fp8compile.numerics.histogram import flags, statistics
from fp8compile.observe.overflow_report import OverflowReport, overflow_report
from fp8compile.observe.plots import headroom_map
from fp8compile.observe.records import ACTIVATION, WEIGHT, Observations, StatisticsRow
from tests.support.measure import compiled
from tests.support.vit import ViT, line_of

FINE, OVER = torch.tensor([1.0, 0.0, 2.0**-20, -8.0]).half(), torch.tensor([1.0, torch.inf, torch.nan, 0.0]).half()


def row(module: str, direction: str = FORWARD, op: str = "mm.default", kind: str = ACTIVATION) -> StatisticsRow:
    return StatisticsRow(module, f"model.py:7 in forward: {module}", op, kind, direction, "f16")


def observed(*rows: StatisticsRow) -> Observations:
    return Observations(rows, torch.device("cpu"))


def seen(*values: Tensor) -> Tensor:
    return torch.stack([statistics(value) for value in values])


def observed_gradient() -> Observations:
    one = observed(row("", BACKWARD, op="input"))
    one.add(seen(OVER))
    return one


def told(*several: Observations, history: tuple[tuple[int, float], ...] = ()) -> OverflowReport:
    return overflow_report(SimpleNamespace(observations=several, history=history))


def train(model: nn.Module, images: Tensor, steps: int, lr: float = 1e-3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        F.cross_entropy(model(images).float(), torch.zeros(len(images), dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_unstable_block_is_named_with_op_line_step_and_direction(capsys: pytest.CaptureFixture[str]) -> None:
    model, images = ViT(depth=2).half(), torch.randn(4, 3, 16, 16).half()
    fn = compiled(model)
    with pytest.raises(ValueError, match="found nothing observed for this OptimizedModule"):
        overflow_report(fn)
    train(fn, images, 2)
    report = overflow_report(fn, watch=True)
    assert (
        report.first is None and report.steps == (1, 2) and report.line.startswith("no inf and no NaN in 2 step(s)")
    )
    assert {layer.direction for layer in report.layers} == {FORWARD, BACKWARD}
    model.blocks[1].make_unstable()
    train(fn, images, 1)
    report = overflow_report(model)
    first = report.first
    assert first is not None and (first.module, first.direction) == ("blocks.1.down", FORWARD)
    assert (first.op, first.first_step) == ("addmm.default", 3)
    assert first.source.startswith(f"vit.py:{line_of('self.down(')} in forward")
    assert first.at_first is not None and first.at_first.inf > 0 and first.amax_before is not None
    assert 0.1 < first.amax_before < 10 and not report.data
    innocent = [layer for layer in report.layers if layer.module.startswith(("blocks.0", "blocks.1.up"))]
    assert innocent and all(layer.first_step is None for layer in innocent if layer.direction == FORWARD)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 and printed[0].startswith(f"fp8compile: {report.line} (and in ")
    assert str(report).splitlines()[0] == report.line


def test_nan_in_the_data_is_the_datas() -> None:
    model, x = nn.Linear(8, 4).half(), torch.randn(4, 8).half()
    fn = compiled(model)
    train(fn, x, 1, lr=0.0)
    x[0, 0] = torch.nan
    train(fn, x, 1, lr=0.0)
    report = overflow_report(fn)
    assert report.data and report.line.startswith(
        "step 2: in the data, which no layer made: NaN among its f16 values"
    )


def test_inf_in_the_data_counts_only_where_something_breaks_with_it() -> None:
    """Alone it may be a mask of -inf."""
    mask = FINE.masked_fill(FINE == 0, -torch.inf)
    both = observed(row("", op="input", kind="data"), row("a"))
    both.add(seen(mask, FINE))
    both.close()
    assert told(both).first is None
    both.add(seen(mask, OVER))
    both.close()
    first = told(both).first
    assert first is not None and (first.module, first.first_step) == ("a", 2)
    at_once = observed(row("", op="input", kind="data"), row("a"))
    at_once.add(seen(mask, OVER))
    assert told(at_once).data and "inf in 1 of 4" in told(at_once).line


def test_first_is_the_earliest_step_then_forward_then_the_order_of_the_graphs() -> None:
    early, late = observed(row("a"), row("a", BACKWARD)), observed(row("b"), row("b", BACKWARD))
    for each in (early, late):
        each.add(seen(FINE, FINE))
        each.close()
    early.add(seen(FINE, OVER))
    late.add(seen(FINE, OVER))
    first = told(early, late).first
    assert first is not None and (first.module, first.direction) == ("b", BACKWARD)  # the last backward runs first
    assert told(observed_gradient()).line.startswith(
        "step 1: the gradient that reaches the model (backward) at model.py:7"
    )
    late.add(seen(OVER, FINE))
    first = told(early, late).first
    assert first is not None and (first.module, first.direction, first.first_step) == ("b", FORWARD, 2)
    early.add(seen(OVER, FINE))
    assert (first := told(early, late).first) is not None and first.module == "a"
    early.close(), early.close(), late.close()
    assert (first := told(early, late).first) is not None and first.module == "a" and first.first_step == 2


def test_the_numbers_of_a_layer() -> None:
    one = observed(row("a"), row("w", BACKWARD, kind=WEIGHT))
    one.add(seen(FINE, FINE))
    one.add(seen(FINE * 2, FINE * 0))
    one.close()
    one.add(seen(torch.full((4,), 2.0**14).half(), FINE))
    a, w = told(one).layers
    assert a.amax == ((1, 16.0), (2, 2.0**14)) and a.headroom == math.log2(65504 / 2**14)
    assert (a.underflow, a.subnormal) == (2 / 12, 2 / 12) and (w.underflow, w.subnormal) == (6 / 12, 2 / 12)
    assert w.headroom == math.log2(65504 / 8) and a.at_first is None and a.first_step is None
    assert observed(row("a")).rows and told(observed(row("a"))).layers[0].headroom == math.inf


def test_a_compiled_forward_is_not_counted() -> None:
    one = observed(row("a"))
    one.add(flags(torch.tensor([8.0]), torch.float16))
    one.close()
    one.add(flags(torch.tensor([torch.inf]), torch.float16))
    (a,) = told(one).layers
    assert (a.counted, a.underflow, a.subnormal, a.amax_before, a.first_step) == (False, None, None, 8.0, 2)
    assert told(one).line.endswith("model.py:7 in forward: a: inf among its f16 values, amax before 8")
    assert str(told(one)).splitlines()[3].split()[-2:] == ["-", "-"]


def test_a_step_that_is_no_longer_kept_is_still_the_first() -> None:
    one = observed(row("a"))
    one.add(seen(OVER))
    one.close()
    for _ in range(1024):
        one.add(seen(FINE))
        one.close()
    report = told(one)
    assert (
        report.line
        == "step 1: a (forward) mm.default at model.py:7 in forward: a: inf or NaN, in a step no longer kept"
    )


def test_the_same_row_compiled_twice_is_one_layer_and_one_of_other_parameters_is_not() -> None:
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    device = torch.device("cpu")
    several = [Observations([row("a")], device, [p]) for _ in range(2)] + [Observations([row("a")], device, [q])]
    for step, each in enumerate(several, 1):
        each.add(seen(FINE))
        each.close(step)
    assert [layer.amax for layer in told(*several).layers] == [((1, 8.0), (2, 8.0)), ((3, 8.0),)]
    several[1].add(seen(FINE * 2))
    several[1].close(1)
    again = told(*several).layers[0].history[0]
    assert (again.step, again.amax, again.numel, again.zero) == (1, 16.0, 8, 2)


def test_an_optimizer_ends_a_step_with_all_its_backwards_unless_a_scaler_does() -> None:
    model = nn.Linear(4, 4).half()
    fn = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        for _ in range(3):
            fn(torch.ones(2, 4).half()).sum().backward()
        optimizer.step()
    layer = next(layer for layer in overflow_report(fn).layers if layer.module == "weight")
    assert [(s.step, s.numel) for s in layer.history] == [(1, 48), (2, 48)]
    from fp8compile.observe import records

    (slot,) = records.of_model(model)
    slot.saturate(False)
    fn(torch.ones(2, 4).half()).sum().backward()
    optimizer.step()
    assert len(slot.history) == 2 and slot.additions == 1


def test_each_row_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = observed(row("a"), row("b"), row("c", BACKWARD))
    scaler = SimpleNamespace(observations=[one], history=())
    overflow_report(scaler, watch=True), overflow_report(scaler, watch=True)
    one.add(seen(FINE, OVER, OVER))
    one.close(), one.add(seen(FINE, OVER, OVER)), one.add(seen(OVER, OVER, OVER))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (forward)")[0] for line in lines] == ["fp8compile: step 1: b", "fp8compile: step 2: a"]
    assert lines[0].endswith("inf in 1 and NaN in 1 of 4 f16 values, amax before - (and in 1 more)")


def test_json_and_table() -> None:
    one = observed(row("a"), *(row(f"b{i}") for i in range(30)))
    one.add(seen(FINE * 0, *([OVER] * 30)))
    report = told(one, history=((1, 2.0**16),))
    data = json.loads(report.to_json())
    assert data["first"] == report.line and data["loss_scale"] == [[1, 65536.0]] and len(data["layers"]) == 31
    assert data["layers"][0]["headroom"] is None and data["layers"][1]["history"][0]["nan"] == 1
    lines = str(report).splitlines()
    assert lines[0] == report.line and "7 more in report.layers" in lines[-1] and lines[3].startswith("b0 ")


def test_pictures(tmp_path: Path) -> None:
    one, other = observed(row("a")), observed(row("b"))
    for step in (1, 2):
        one.add(seen(FINE if step == 1 else OVER))
        one.close()
    other.add(seen(FINE * 2))
    other.close(2)
    names, steps, values = headroom_map(told(one, other).layers)
    assert names == ["a forward mm.default", "b forward mm.default"] and steps == [1, 2]
    assert (
        values[0] == [math.log2(65504 / 8), 0.0]
        and math.isnan(values[1][0])
        and values[1][1] == math.log2(65504 / 16)
    )
    assert [path.name for path in told(one).plot(tmp_path)] == ["headroom.png"]
    written = told(one, other, history=((1, 4.0), (2, 2.0))).plot(tmp_path / "new")
    assert [path.name for path in written] == ["headroom.png", "loss_scale.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = observed(row("a"))
    for _ in range(2):
        one.add(seen(FINE))
        one.close()
    scalars: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    told(one, history=((1, 4.0), (2, 2.0))).to_tensorboard(writer, since=2)
    assert scalars == [
        ("headroom/a forward mm.default", math.log2(65504 / 8), 2),
        ("amax/a forward mm.default", 8.0, 2),
        ("underflow/a forward mm.default", 0.25, 2),
        ("loss_scale", 2.0, 2),
    ]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ImportError, match="needs tensorboard, which is not installed: pip install tensorboard, or give"
    ):
        told(one).to_tensorboard(tmp_path)


def test_what_is_neither_a_model_nor_a_scaler() -> None:
    with pytest.raises(
        ValueError, match=r"takes a model or a loss scaler, such as fp8compile.amp.LossScaler, not int"
    ):
        overflow_report(3)
    with pytest.raises(ValueError, match=r"nothing observed for this Linear.*fp8compile.amp.watch"):
        overflow_report(nn.Linear(2, 2))


def test_modules_of_a_graph_that_begins_at_a_break_have_their_whole_path() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            torch._dynamo.graph_break()
            return h * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Broken(), Broken()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model().half()
    fn = compiled(model)
    with torch.no_grad():
        model.layers[1].lin.weight.fill_(60000.0)
    fn(torch.ones(2, 8).half()).float().sum().backward()
    first = overflow_report(fn).first
    assert first is not None and (first.module, first.op) == ("layers.1.lin", "addmm.default")
