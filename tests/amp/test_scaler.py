"""Bad input, closures, several models, saving and loading."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile import optim
from fp8compile.amp import Limits, LossScaler, watch
from tests.support.amp_models import batch, grown, loss_of, net, sgd, spoil, train

MODES = ("histogram", "dynamic", "static")
BAD_OPTIONS = [
    ({"mode": "auto"}, "mode='auto'"),
    ({"init_scale": 0.0}, "init_scale=0.0"),
    ({"init_scale": 2.0**30}, "within"),
    ({"init_scale": 2.0, "floor": 4.0}, r"\[4.0"),
    ({"period": 0}, "period=0"),
    ({"threshold": 1.0}, "threshold=1.0"),
    ({"mode": "dynamic", "growth_factor": 1.0}, "growth_factor=1.0"),
    ({"mode": "dynamic", "backoff_factor": 1.0}, "backoff_factor=1.0"),
    ({"mode": "dynamic", "growth_interval": 0}, "growth_interval=0"),
    ({"kinds": ("weights",)}, "kinds="),
    ({"kinds": ()}, "kinds="),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaler(**options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_loss_that_is_not_real(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"{dtype}.*loss\.float"):
        LossScaler().scale(torch.ones(2).to(dtype))


def test_a_complex_gradient() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    scaler = LossScaler("static")
    scaler.scale(p.abs().sum()).backward()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*complex64"):
        scaler.step(torch.optim.SGD([p], lr=0.1))


def test_float64_is_scaled_and_has_no_histogram() -> None:
    p, half = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = LossScaler(init_scale=4.0)
    optimizer = torch.optim.SGD([p, half], lr=1.0)
    scaler.scale((p * 1e5).sum() + half.double().sum()).backward()
    scaler.step(optimizer)
    assert p.tolist() == [1 - 1e5] * 2 and half.tolist() == [0.0] * 2
    scaler.update()
    assert scaler.get_scale() == 8  # 4e5 would have been large


@pytest.mark.parametrize("mode", MODES)
def test_order_of_calls(mode: str) -> None:
    model = net()
    scaler, optimizer = LossScaler(mode), sgd(model)
    with pytest.raises(RuntimeError, match="no loss was scaled"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"update\(\) without"):
        scaler.update()
    loss = scaler.scale(loss_of(model, batch(0)))
    with pytest.raises(RuntimeError, match="no parameter of this optimizer has a gradient"):
        scaler.step(optimizer)
    loss.backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="new_scale=-1"):
        scaler.update(-1.0)
    scaler.update()
    with pytest.raises(RuntimeError, match="no loss was scaled"):
        scaler.step(optimizer)  # stale gradients, not scaled anew


@pytest.mark.parametrize("mode", MODES)
def test_not_enabled_does_nothing(mode: str) -> None:
    ours, theirs = net(), net()
    scaler = LossScaler(mode, enabled=False)
    first, second = sgd(ours), sgd(theirs)
    for i in range(5):
        first.zero_grad()
        loss = loss_of(ours, batch(i))
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.unscale_(first)
        scaler.step(first)
        scaler.update()
        second.zero_grad()
        loss_of(theirs, batch(i)).backward()
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert scaler.state_dict() == {} and scaler.get_scale() == 1 and not scaler.is_enabled()
    scaler.load_state_dict({})


@pytest.mark.parametrize("mode", MODES)
def test_closures_are_steps(mode: str) -> None:
    ours, theirs = net(), net()
    scalers = LossScaler(mode, collapse=False), LossScaler(mode, collapse=False)
    optimizers = sgd(ours), sgd(theirs)
    hit = spoil(torch.nan, [3])
    for i in range(8):

        def closure(i: int = i) -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = loss_of(ours, batch(i))
            scalers[0].scale(loss).backward()
            hit(i, ours)
            if i % 2:
                scalers[0].unscale_(optimizers[0])
            return loss

        result = scalers[0].step(optimizers[0], closure) if i % 3 else scalers[0].step(optimizers[0], closure=closure)
        scalers[0].update()
        assert (result is None) == (i == 3)
        train(scalers[1], theirs, optimizers[1], [i], hit)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert scalers[0].history == scalers[1].history and scalers[0].skipped == 1


def lbfgs_closure(scaler: LossScaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch(0, torch.float32))
    scaler.scale(loss).backward()
    return loss


@pytest.mark.parametrize("mode", MODES)
def test_lbfgs(mode: str) -> None:
    """Its closure is evaluated several times; the scale is a power of 2, so that it leaves no trace in FP32."""
    results = []
    for scaler in (LossScaler(mode, init_scale=2.0**8), LossScaler(enabled=False)):
        model = net(torch.float32)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        for _ in range(3):
            scaler.step(optimizer, functools.partial(lbfgs_closure, scaler, model, optimizer))
            scaler.update()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_later_evaluation_that_fails_is_an_error() -> None:
    model = net()
    optimizer, scaler = torch.optim.LBFGS(model.parameters()), LossScaler()
    calls = iter(range(100))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0))
        scaler.scale(loss).backward()
        spoil(torch.nan, [1])(next(calls), model)
        return loss

    with pytest.raises(FloatingPointError, match="cannot be skipped"):
        scaler.step(optimizer, closure)


@pytest.mark.parametrize("watched", [True, False], ids=["hooks", "gradients alone"])
def test_a_gan_has_a_scale_for_each(watched: bool) -> None:
    """The generator's loss goes through the discriminator, whose gradients then are the generator's: at its scale."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 8).half(), nn.Linear(8, 1).half()
    if watched:
        watch(generator)
        watch(discriminator)
    scalers = grown(LossScaler(), 2.0**4), grown(LossScaler(), 2.0**4)
    optimizers = torch.optim.SGD(generator.parameters(), 0.0), torch.optim.SGD(discriminator.parameters(), 0.0)
    for i in range(6):
        z = batch(i)[:, :4]
        for optimizer in optimizers:
            optimizer.zero_grad()
        scalers[1].scale(discriminator(generator(z).detach()).float().mean()).backward()
        scalers[1].step(optimizers[1])
        scalers[1].update()
        # 2**13 * 2**4 overflows: in the generator's loss alone
        scalers[0].scale(discriminator(generator(z)).float().mean() * 2.0**13).backward()
        scalers[0].step(optimizers[0])
        scalers[0].update()
    assert [scale for _, scale in scalers[1].history] == [2.0**k for k in range(5, 11)]
    assert scalers[0].get_scale() < 2.0**4
    if watched:
        assert [len(scaler.observations) for scaler in scalers] == [1, 1]
        assert scalers[0].observations[0] is not scalers[1].observations[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("period", [1, 4])
def test_the_rest_of_a_loaded_run_is_the_same_bit_for_bit(mode: str, period: int) -> None:
    def make() -> tuple[LossScaler, nn.Sequential, torch.optim.Optimizer]:
        model = net()
        watch(model)
        own = {"histogram": {"period": period}, "static": {}}.get(mode, {})
        own |= {} if mode == "static" else {"growth_interval": 3}
        scaler = LossScaler(mode, **own, collapse=True, limits=Limits(warmup=5, surge=3.0))
        return scaler, model, optim.AdamW(model, lr=1e-2, compiled=False)

    hit = spoil(torch.nan, [9, 23, 24])
    scaler, model, optimizer = make()
    train(scaler, model, optimizer, range(22), hit)
    saved = copy.deepcopy([each.state_dict() for each in (scaler, model, optimizer)])
    rest = train(scaler, model, optimizer, range(22, 60), hit)
    again = make()
    for each, state in zip(again, saved, strict=True):
        each.load_state_dict(state)
    assert again[0].get_scale() == saved[0]["scale"]
    assert train(*again, range(22, 60), hit) == rest
    assert all(torch.equal(a, b) for a, b in zip(again[1].parameters(), model.parameters(), strict=True))
    assert again[0].state_dict() == scaler.state_dict() and len(set(rest)) > (mode != "static")
    assert scaler.skipped == 3 or mode == "dynamic"  # which also skips what overflows as it probes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"mode": "dynamic"}, "mode 'dynamic'"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"history": None}, "lacks history"),
        ({"watchdog": {}}, r"lacks watchdog\.bad_in_a_row"),
        ({"options": {"period": 1}}, r"lacks options\.growth_factor"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    model = net()
    scaler = LossScaler()
    train(scaler, model, sgd(model), range(3))
    before = scaler.state_dict()
    state = {name: value for name, value in ({**before, **change}).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    with pytest.raises(ValueError, match="empty"):
        scaler.load_state_dict({})
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("watched", [True, False], ids=["hooks", "gradients alone"])
def test_the_host_waits_once_per_step(mode: str, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    if watched:
        watch(model)
    scaler, optimizer = LossScaler(mode), optim.AdamW(model, lr=1e-3, compiled=False)
    train(scaler, model, optimizer, range(2))
    lists: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (lists.append(1), tolist(x))[1])
    for i in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(i))
        with Waits() as waits:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        assert waits.found == [] and len(lists) == i
        scaler.step(optimizer)
        assert len(lists) == i + 1
        with Waits() as waits:
            scaler.update()
        assert waits.found == [] and len(lists) == i + 1
