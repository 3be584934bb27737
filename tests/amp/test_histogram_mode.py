"""mode="histogram": Graphcore's rule on what hooks saw, or on the gradients as they lie there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from fp8compile import optim
from fp8compile.amp import LossScaler, watch
from fp8compile.amp.histogram import Counter
from fp8compile.observe.records import Observations, StatisticsRow
from tests.support.amp_models import batch, grown, loss_of, net, sgd, spoil, train
from tests.support.loss_scale import expected_scale

TINY = 2.0**-26  # half of FP16's smallest number


@pytest.mark.parametrize("watched", [True, False], ids=["hooks", "gradients alone"])
def test_starts_at_1_rises_and_settles(watched: bool) -> None:
    model = net()
    seen = watch(model) if watched else None
    scaler, scale = LossScaler(growth_interval=1), 1.0
    optimizer = sgd(model, lr=1e-3)
    for i in range(40):
        (after,) = train(scaler, model, optimizer, [i])
        if seen is not None:
            assert after == expected_scale(seen, scale)
        scale = after
    scales = [each for _, each in scaler.history]
    assert scales[:8] == [2.0**k for k in range(1, 9)]
    assert max(scales) < 2.0**24 and scales[-1] < 4 * min(scales[-10:])
    assert scaler.skipped == 0


def test_forward_rows_do_not_count() -> None:
    model = net()
    seen = watch(model)
    with torch.no_grad():
        model[0].weight.fill_(30000.0)
    scaler = grown(LossScaler(), 2.0**-20)  # gradients are tiny, activations beyond 2**13
    train(scaler, model, sgd(model, 0.0), [0])
    forward = [n for row, n in zip(seen.rows, seen.history[-1][1], strict=True) if row.direction == "forward"]
    assert sum(n[1] for n in forward) > 0 and scaler.get_scale() == 2.0**-19


def test_clips_and_never_skips() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = grown(LossScaler(), 16.0)
    before = model[0].weight.detach().clone()
    train(scaler, model, optimizer, [0], spoil(torch.inf, [0]))
    moved = (before - model[0].weight).view(-1)[3].item()
    assert moved == pytest.approx(65504 / 16, rel=1e-3) and scaler.skipped == 0 and scaler.get_scale() == 8


def test_what_overflows_inside_is_clipped_there() -> None:
    """Without clipping in the backward an inf becomes NaN in tanh's derivative or in a sum."""
    for watched in (True, False):
        model = net()
        if watched:
            watch(model)
        scaler = grown(LossScaler(), 2.0**22)
        loss = model(batch(0) * 8).float().pow(2).sum() * 64
        scaler.scale(loss).backward()
        scaler.step(sgd(model, 0.0))
        scaler.update()
        assert scaler.skipped == (not watched)


def test_nan_is_skipped_counted_as_large_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    watch(model)
    scaler, optimizer = grown(LossScaler(), 16.0), sgd(model, 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with caplog.at_level(logging.WARNING, "fp8compile"):
        assert train(scaler, model, optimizer, [0], spoil(torch.nan, [0])) == [8.0]
        assert scaler.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "step skipped" in caplog.text and "data" not in caplog.text


def test_nan_in_the_data_is_the_datas(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    seen = watch(model)
    scaler, optimizer = grown(LossScaler(), 16.0), sgd(model, 1.0)
    x = batch(0)
    x[0, 0] = torch.nan
    with caplog.at_level(logging.WARNING, "fp8compile"):
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped == 1
    assert "from the data" in caplog.text
    assert scaler.get_scale() == 16.0  # no scale helps
    data = next(n for row, n in zip(seen.rows, seen.history[-1][1], strict=True) if row.op == "input")
    assert data[3] == 1 and all(p.isfinite().all() for p in model.parameters())


def test_no_gradients_leave_the_scale() -> None:
    model = net()
    watch(model)
    scaler = grown(LossScaler(kinds=("activation",), modules=("2",)), 16.0)
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    scaler.scale(model[0](batch(0)).float().sum()).backward()  # module 2 takes no part: nothing seen of it
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0


def test_a_pattern_that_matches_nothing() -> None:
    model = net()
    watch(model)
    with pytest.raises(ValueError, match=r"'layers\.\*' matches no module; near it: 0"):
        train(LossScaler(modules=("layers.*",)), model, sgd(model), [0])
    with pytest.raises(ValueError, match=r"'2\.wieght' matches no module; near it: 2\.weight"):
        train(LossScaler(modules=("0", "2.wieght")), model, sgd(model), [0])
    with pytest.raises(ValueError, match="'nope' matches no module"):
        watch(model, modules=("nope",))
    with pytest.raises(ValueError, match="tuple of patterns"):
        watch(model, modules="0")


@pytest.mark.parametrize("period", [2, 3])
def test_a_period_decides_on_all_of_its_updates(period: int) -> None:
    model = net()
    scaler = LossScaler(period=period, growth_interval=1)
    hit = spoil(20000.0, [period * 2])  # the first update of the third period, and of no other
    scales = train(scaler, model, sgd(model, 0.0), range(period * 4), hit)
    assert scales[period - 1 :: period] == [2, 4, 2, 4]
    assert all(scales[i] == scales[i - 1] for i in range(1, period * 4) if (i + 1) % period)


def test_a_chosen_subset_decides() -> None:
    for kinds, modules, falls in (
        (("weight",), ("0",), True),
        (("weight",), ("2",), False),
        (("activation",), ("*",), False),
    ):
        model = net()
        watch(model)
        model[0].weight.register_hook(
            lambda g: torch.full_like(g, 20000.0)
        )  # behind the hook of watch: not seen by it
        model2 = net()
        model2[0].weight.register_hook(lambda g: torch.full_like(g, 20000.0))
        watch(model2)  # sees it
        scaler = grown(LossScaler(kinds=kinds, modules=modules), 16.0)
        assert train(scaler, model2, sgd(model2, 0.0), [0]) == [8.0 if falls else 32.0]


def test_subset_without_hooks_goes_by_names() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.0)
    scaler = grown(LossScaler(modules=("2",)), 16.0)
    assert train(scaler, model, optimizer, [0], spoil(20000.0, [0])) == [32.0]  # module 0 was hit
    with pytest.raises(ValueError, match=r"has no name: call fp8compile.amp.watch"):
        train(grown(LossScaler(modules=("2",)), 16.0), model, sgd(model), [0])


def test_no_observation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with caplog.at_level(logging.WARNING, "fp8compile"):
        train(LossScaler(), model, sgd(model), range(3))
    assert caplog.text.count("no statistics of layers") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_fp16_gradient_is_said_and_nothing_done(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = net(dtype), net(dtype)
    scaler = LossScaler(init_scale=3.0)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        assert train(scaler, ours, sgd(ours), range(5), dtype=dtype) == [1.0] * 5
    train(LossScaler(enabled=False), theirs, sgd(theirs), range(5), dtype=dtype)
    assert caplog.text.count("nothing to scale") == 1
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert scaler.scale(torch.ones(())) == 1


def test_autocast_is_not_taken_for_fp32() -> None:
    model = net(torch.float32)
    watch(model)
    scaler, optimizer = LossScaler(), sgd(model, 1e-3)
    for i in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch(i, torch.float32))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 64
    assert {row.dtype for row in scaler.observations[0].rows if row.direction == "backward"} == {"f16", "f32"}


def test_a_loss_in_fp16_caps_the_scale(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    scaler, optimizer = grown(LossScaler(), 2.0**20), sgd(model, 0.0)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        for i in range(3):
            optimizer.zero_grad()
            loss = model(batch(i) * 2.0**-6).pow(2).mean() * 2.0**-6
            assert loss.dtype == torch.float16
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**15 and scaler.skipped == 0 and "ceiling is now 32768" in caplog.text


def test_two_optimizers_one_scale() -> None:
    model = net()
    watch(model)
    first, second = torch.optim.SGD(model[0].parameters(), 1e-2), torch.optim.SGD(model[2].parameters(), 1e-2)
    scaler = LossScaler()
    for i in range(3):
        scaler.scale(loss_of(model, batch(i))).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert scaler.get_scale() == 8 and len(scaler.observations) == 1
    assert len(scaler.observations[0].history) == 3  # closed once each


def test_sparse_gradients_are_coalesced() -> None:
    table = nn.Embedding(10, 4, sparse=True).half()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = grown(LossScaler(), 2.0**12)
    before = table.weight.detach().clone()
    index = torch.tensor([1, 1, 1, 1, 5])
    scaler.scale(
        table(index).float().sum() * 6
    ).backward()  # 4 * 6 * 2**12 is more than FP16 has: each row but not the sum
    scaler.step(optimizer)
    assert table.weight.grad.is_coalesced()  # type: ignore[union-attr]
    assert (before - table.weight)[1].tolist() == pytest.approx([65504 / 2**12] * 4, rel=2e-3)
    assert (before - table.weight)[5].tolist() == pytest.approx([6.0] * 4, rel=2e-3)
    scaler.update()
    assert scaler.get_scale() == 2.0**11 and scaler.skipped == 0


def unscaled(make: Any) -> torch.Tensor:
    """The gradient that an optimizer gets where the true one is half of FP16's smallest number."""
    p = nn.Parameter(torch.ones(100, dtype=torch.float16))
    optimizer = make([p])
    scaler = LossScaler("static", init_scale=2.0**16)
    scaler.scale((p.float() * TINY).sum()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_([p], 1e9)
    assert p.grad is not None and norm.item() == pytest.approx(p.grad.float().norm().item())
    scaler.step(optimizer)
    scaler.update()
    scaler._ledger.read()
    return p.grad


def test_our_optimizers_lose_nothing_and_torchs_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8compile"):
        ours = unscaled(lambda p: optim.AdamW(p, lr=1e-3, compiled=False))
        assert ours.dtype == torch.float32 and (ours == TINY).all() and "became 0" not in caplog.text
        assert (unscaled(lambda p: torch.optim.SGD(p, lr=1e-3)) == 0).all()
    assert "100 FP16 gradients became 0" in caplog.text and "fp8compile.optim" in caplog.text


def test_fp32_gradients_survive_zero_grad_without_none() -> None:
    model = net()
    optimizer = optim.AdamW(model, lr=1e-3, compiled=False)
    scaler = LossScaler()
    for i in range(3):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model, batch(i))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8


def test_which_rows_count_and_what_of_them() -> None:
    def row(module: str, kind: str, direction: str, dtype: str) -> StatisticsRow:
        return StatisticsRow(module, "", "op", kind, direction, dtype)

    rows = [row("a.b", "activation", "backward", dtype) for dtype in ("f16", "f32", "bf16")]
    rows += [
        row("a", "activation", "forward", "f16"),
        row("c", "weight", "backward", "f16"),
        row("", "data", "forward", "f16"),
    ]
    seen = torch.tensor(
        [[10.0**i, 2 * 10.0**i, 3 * 10.0**i, 4 * 10.0**i, 0, 0, 7] for i in range(6)], dtype=torch.float64
    )
    observed = Observations(rows, torch.device("cpu"))
    expected = {
        (("weight", "activation"), ("*",)): [1 + 1e4, 9 + 70 + 9e4],  # of FP32, inf and NaN alone: FP16 numbers once
        (("weight",), ("*",)): [1e4, 9e4],
        (("activation",), ("a",)): [1, 79],
        (("weight", "activation"), ("c", "d")): [1e4, 9e4],
    }
    for (kinds, modules), (h1, h2) in expected.items():
        assert Counter(kinds, modules).of_rows(observed, seen).tolist() == [h1, h2]
