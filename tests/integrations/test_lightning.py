"""Lightning: what the callback compiles and says, parity with a twin, checkpoints, resuming, the loss scaler."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from examples import lightning_fit  # noqa: E402
from fp8compile.integrations.lightning import Fp8CompileCallback  # noqa: E402
from tests.integrations.parity import assert_parity  # noqa: E402
from tests.integrations.twins import beside_its_twin  # noqa: E402
from tests.support.net import Net  # noqa: E402

OPTIONS = {"debug.codegen": "eager", "linears.emulate": True}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
BATCHES = [torch.randn(128, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
    """Two linears, 64 to 64, that learn to sort: a task in which the loss falls at once."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = inner or Net(nn.functional.gelu)
        self.losses: list[float] = []

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(x).float(), x.sort(-1).values)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fp8compile.optim.AdamW(self.net, lr=1e-2, compiled=False)


def fit(module: Any, callbacks: list[Any], epochs: int = 1, start: Path | None = None, **changes: Any) -> Any:
    torch._dynamo.reset()
    usual = {"accelerator": "cpu", "precision": "32-true", **QUIET}
    trainer = pl.Trainer(callbacks=callbacks, devices=1, max_epochs=epochs, **{**usual, **changes})
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None), ckpt_path=start)  # type: ignore[arg-type]
    return trainer


def scaled(scaler: fp8compile.amp.LossScaler) -> dict[str, Any]:
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}  # type: ignore[arg-type]


class Figures(pl.loggers.logger.DummyLogger):  # type: ignore[misc,name-defined]
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append(metrics)


def test_it_compiles_the_inner_module_and_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp8compile")
    module, logger, callback = Module(), Figures(), Fp8CompileCallback(OPTIONS)
    keys = list(module.state_dict())
    trainer = fit(module, [callback], epochs=2, logger=logger)
    report = callback.report
    assert report is not None and {m.origin.module for m in report.linears} == {"net.a", "net.b"}
    assert len(report.linears) == 5  # two forwards, two wgrads, and one dgrad: nobody asks for that of the data
    told = [got for got in logger.got if "fp8_matmuls" in got]
    assert told == [
        {"fp8_matmuls": 5, "saved_bytes": report.saved_bytes, "saved_bytes_plain": report.saved_bytes_plain}
    ]
    assert report.saved_bytes < report.saved_bytes_plain
    assert sum("5 of 5 matmuls of linears in FP8" in text for text in caplog.messages) == 1
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    assert list(checkpoint["state_dict"]) == keys and isinstance(module.net, Net)


class Apart(nn.Module):
    """A model of which Dynamo sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)  # a shape of its own: no graph of another test can serve it

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_it_warns_once_where_nothing_was_compiled(caplog: pytest.LogCaptureFixture) -> None:
    callback = Fp8CompileCallback(OPTIONS)
    fit(Module(Apart()), [callback], epochs=2)
    said = [text for text in caplog.messages if text.startswith("Fp8CompileCallback compiled 'net' of Module")]
    assert len(said) == 1 and "the first step ran no graph of it" in said[0]
    assert callback.report is None


def test_what_is_compiled_already_stays_so() -> None:
    module, callback = Module(), Fp8CompileCallback({"preset": "off"})
    module.net.a.compile(backend="fp8compile", options=OPTIONS)
    fit(module, [callback])
    assert callback.report is not None and "'emulate': True" in callback.report.recipe


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (None, "Module has net, other. Name what to compile: Fp8CompileCallback(modules=['net', 'other'])"),
        ("nte", "Fp8CompileCallback(modules='nte'): Module has no such module; it has net, other"),
        ("", "Fp8CompileCallback(modules=''): Module has no such module"),
    ],
)
def test_which_module_is_meant_must_be_clear(modules: str | None, message: str) -> None:
    module = Module()
    module.other = nn.Linear(4, 4)
    with pytest.raises(ValueError) as caught:
        Fp8CompileCallback(OPTIONS, modules=modules).on_fit_start(None, module)
    assert message in str(caught.value)


def test_several_modules_are_compiled_each_by_itself() -> None:
    module = Module(nn.Sequential(Net(nn.functional.gelu), Net(torch.tanh)))
    callback = Fp8CompileCallback(OPTIONS, modules=["net.0", "net.1"])
    fit(module, [callback])
    assert callback.report is not None
    assert [g.kind for g in callback.report.graphs] == ["training", "training"]
    assert {m.origin.module for m in callback.report.linears} == {"net.0.a", "net.0.b", "net.1.a", "net.1.b"}


@pytest.mark.parametrize("half", [False, True], ids=["FP32", "FP16 with LossScaler"])
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted_bit_for_bit(half: bool, tmp_path: Path) -> None:
    """Parameters, the optimizer's codes, and the loss scale with its history."""

    def run(epochs: int, start: Path | None = None) -> tuple[Any, Any, list[Any]]:
        scaler = fp8compile.amp.LossScaler()
        module = Module()
        trainer = fit(module, [Fp8CompileCallback(OPTIONS)], epochs, start, **(scaled(scaler) if half else {}))
        return trainer, copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint()), scaler.history

    _, whole, history = run(2)
    first, early, _ = run(1)
    first.save_checkpoint(path := tmp_path / "epoch.ckpt")
    _, resumed, again = run(2, path)
    assert (len(history) == 8 and history[-1][1] > 1) if half else history == []
    assert history == again
    assert half == ("MixedPrecision" in resumed)
    for part in ("state_dict", "optimizer_states"):
        assert same(whole[part], resumed[part]), part
        assert not same(whole[part], early[part]), part


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((bits(one) == bits(other)).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def test_the_callback_belongs_to_the_lightning_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Fp8CompileCallback(OPTIONS)
    assert isinstance(callback, pl.Callback)
    again = pickle.loads(pickle.dumps(callback))
    assert type(again) is type(callback) and again.options == OPTIONS
    other = types.ModuleType("pytorch_lightning")
    other.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    assert isinstance(Fp8CompileCallback(), other.Callback)  # type: ignore[attr-defined]


def test_the_example_keeps_up_with_its_twin(steps: int = 8) -> None:
    outcome = beside_its_twin(lightning_fit, steps=steps)
    assert_parity(outcome)
    report = outcome.report
    assert len(report.linears) == 42 and report.saved_bytes < 0.25 * report.saved_bytes_plain


@pytest.mark.sweep
def test_the_whole_example_keeps_up_with_its_twin() -> None:
    test_the_example_keeps_up_with_its_twin(60)
