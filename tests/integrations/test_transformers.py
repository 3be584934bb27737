"""Hugging Face's Trainer: the callback compiles, reports and scales; a resumed run is the same bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.amp import LossScaler
from fp8compile.integrations.transformers import Fp8CompileCallback
from tests.integrations.parity import PER_CENT, assert_parity
from tests.integrations.twins import beside_its_twin

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from safetensors.torch import load_file  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from examples import hf_trainer  # noqa: E402

OPTIONS = {"debug.codegen": "eager", "linears.emulate": True}
ROWS, STEPS = 128, 6


class Net(nn.Module):
    """What Trainer asks of a model: keyword arguments in, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(torch.relu(self.down(torch.relu(self.up(x)))))
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class Uncompiled(Net):
    """Dynamo leaves its forward alone."""

    forward = torch._dynamo.disable(Net.forward)  # type: ignore[assignment]


def dataset() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * ROWS, 64, generator=generator)
    return [{"x": row, "labels": row[:16].argmax()} for row in x]


def trainer(folder: Path, model: nn.Module | None = None, callback: Any = None, **changes: Any) -> Trainer:
    """A Trainer of a small model, with our AdamW."""
    torch.manual_seed(0)
    model = model or Net()
    usual: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error"}
    settings = TrainingArguments(str(folder), per_device_train_batch_size=ROWS, **{**usual, **quiet, **changes})
    optimizer = fp8compile.optim.AdamW(model, lr=1e-2, compiled=False)
    callbacks = [] if callback is None else [callback]
    return Trainer(model, settings, train_dataset=dataset(), optimizers=(optimizer, None), callbacks=callbacks)


def in_fp16(made: Trainer) -> Trainer:
    """As on a GPU: accelerate leaves a CPU out where it switches autocast to FP16 on, and nothing else."""
    assert made.accelerator.mixed_precision == "fp16"
    made.accelerator.native_amp = True
    return made


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_an_accumulated_and_checkpointed_run_trains_like_its_twin() -> None:
    outcome = beside_its_twin(hf_trainer, layers=1, steps=16)
    assert_parity(outcome)
    report = outcome.report
    assert len(report.linears) == 3 * 7  # each linear of the layer, and not the head
    assert report.saved_bytes < report.saved_bytes_plain


def test_what_was_compiled_is_logged_once(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    caplog.set_level(logging.INFO, "fp8compile")
    callback = Fp8CompileCallback(OPTIONS, show=True)
    made = trainer(tmp_path, callback=callback)
    made.train()
    assert callback.report is not None
    counted = {
        "fp8_matmuls": 8,  # three for each of three linears, but for the gradient of the input
        "saved_bytes": callback.report.saved_bytes,
        "saved_bytes_plain": callback.report.saved_bytes_plain,
    }
    first, *others = made.state.log_history
    assert counted.items() <= first.items()
    assert not any(counted.keys() & entry.keys() for entry in others)
    said = [m for m in caplog.messages if "matmuls of linears in FP8" in m]
    assert len(said) == 1 and "1 training graph, 8 of 8 matmuls of linears in FP8" in said[0]
    assert capsys.readouterr().out.count("fp8compile: 1 training graph") == 1


def test_a_model_that_is_compiled_keeps_its_recipe(tmp_path: Path) -> None:
    model = Net()
    model.compile(backend="fp8compile", options={"debug.codegen": "eager", "linears": "off"})
    callback = Fp8CompileCallback(OPTIONS)
    trainer(tmp_path, model, callback, max_steps=1).train()
    assert callback.report is not None
    assert len(callback.report.linears) == 0


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_model_without_graphs_is_warned_of(tmp_path: Path, caplog: Any, backend: str | None) -> None:
    model = Uncompiled() if backend is None else Net()
    if backend is not None:
        model.compile(backend=backend)
    callback = Fp8CompileCallback(OPTIONS)
    trainer(tmp_path, model, callback, max_steps=2).train()
    assert callback.report is None
    assert sum(f"no graph of this {type(model).__name__} was compiled" in m for m in caplog.messages) == 1


def test_gradients_are_checked_where_training_begins(tmp_path: Path, caplog: Any) -> None:
    rows = dataset()[:ROWS]
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}
    callback = Fp8CompileCallback(OPTIONS, check=batch)
    made = trainer(tmp_path, callback=callback)
    made.model.eval()
    made.callback_handler.on_train_begin(made.args, made.state, made.control)
    assert callback.checked is not None and callback.checked.ok
    assert len(callback.checked.rows) == 6  # every parameter
    assert not made.model.training


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, precision: str) -> None:
    """In the middle of an epoch of accumulated batches: states in FP8, the scale, the order come from the checkpoint."""

    def made(folder: str) -> tuple[Trainer, LossScaler | None]:
        changes = {"save_strategy": "steps", "save_steps": STEPS // 3, "gradient_accumulation_steps": 2}
        new = trainer(tmp_path / folder, fp16=precision == "fp16", **changes)
        scaler = LossScaler() if precision == "fp16" else None
        Fp8CompileCallback(OPTIONS, scaler=scaler).attach(in_fp16(new) if scaler else new)
        return new, scaler

    whole, scaler = made("whole")
    whole.train()
    checkpoint = tmp_path / "whole" / f"checkpoint-{STEPS // 3}"
    assert load_file(checkpoint / "model.safetensors").keys() == Net().state_dict().keys()
    torch._dynamo.reset()
    resumed, again = made("resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert differing(parameters(whole.model), parameters(resumed.model)) == []
    assert differing(load_file(checkpoint / "model.safetensors"), parameters(whole.model)) != []  # it trained on
    if scaler is not None and again is not None:
        assert scaler.history == again.history and len(scaler.history) == STEPS


def test_fp16_trains_with_our_scaler_and_logs_it(tmp_path: Path) -> None:
    """Gradients are unscaled before they are clipped. The scale doubles from 1: none comes near FP16's end."""
    scaler = LossScaler()
    new = in_fp16(trainer(tmp_path, fp16=True, lr_scheduler_type="constant"))
    callback = Fp8CompileCallback(OPTIONS, scaler=scaler)
    callback.attach(new)
    new.train()
    entries = [entry for entry in new.state.log_history if "loss" in entry]
    assert [entry["loss_scale"] for entry in entries] == [2.0 ** (i + 1) for i in range(STEPS)]
    assert {entry["skipped_steps"] for entry in entries} == {0}
    assert callback.report is not None and len(callback.report.observed) > 0
    assert not fp8compile.tools.overflow_report(scaler).line.startswith("0")

    torch._dynamo.reset()
    twin = trainer(tmp_path, lr_scheduler_type="constant")
    twin.train()
    exact = [entry["loss"] for entry in twin.state.log_history if "loss" in entry]
    assert (
        exact[0] - exact[-1] > 5 * PER_CENT / 100 * exact[-1]
    )  # what the gap may be is a small part of what was learnt
    assert entries[-1]["loss"] == pytest.approx(exact[-1], rel=PER_CENT / 100)
    norm, exact_norm = entries[0]["grad_norm"], twin.state.log_history[0]["grad_norm"]
    assert norm == pytest.approx(exact_norm, rel=2**-3)  # unscaled before it is clipped; E5M2's rounding


@pytest.mark.sweep  # the same with accelerate alone is in make test
def test_a_step_with_nan_is_skipped_and_counted(tmp_path: Path) -> None:
    """AcceleratedOptimizer learns of it, so the scheduler waits too."""
    new = in_fp16(trainer(tmp_path, fp16=True, max_steps=3))
    callback = Fp8CompileCallback(OPTIONS, scaler=LossScaler())
    callback.attach(new)
    poisoned = iter([False, True, False])
    new.add_callback(Poison(poisoned))
    new.train()
    entries = [entry for entry in new.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in entries] == [0, 1, 1]
    assert entries[1]["learning_rate"] == entries[2]["learning_rate"] < entries[0]["learning_rate"]


class Poison(transformers.TrainerCallback):  # type: ignore[misc]
    """NaN in a gradient before some steps."""

    def __init__(self, when: Any) -> None:
        self.when = when

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Net, **kwargs: Any) -> None:
        factor = float("nan") if next(self.when) else 1.0
        hook = model.up.bias.register_hook(lambda gradient: gradient * factor)
        model.up.bias.register_post_accumulate_grad_hook(lambda _: hook.remove())


def test_a_scaler_is_refused_where_scaled_gradients_would_be_clipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 would clip .* 'no' on 'cpu'"):
        Fp8CompileCallback(scaler=LossScaler()).attach(trainer(tmp_path))
    Fp8CompileCallback(scaler=LossScaler()).attach(trainer(tmp_path, max_grad_norm=0.0))


def test_a_scaler_that_is_not_attached_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="instead of callbacks="):
        trainer(tmp_path, callback=Fp8CompileCallback(scaler=LossScaler())).train()


def test_trainer_does_not_take_the_name(tmp_path: Path) -> None:
    """As docs/guide/trainers.md says; the way round is the callback."""
    with pytest.raises(ValueError, match=r"^'FP8COMPILE' is not a valid DynamoBackend$"):
        trainer(tmp_path, torch_compile_backend="fp8compile")


def test_trainer_does_not_compile_beside_the_callback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compiles the model with 'inductor'"):
        trainer(tmp_path, callback=Fp8CompileCallback(), torch_compile=True).train()
