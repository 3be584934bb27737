"""Hugging Face's Trainer: a callback that compiles the model in place, says what came of it, and brings the loss scaler.

    Trainer(model, args, ..., callbacks=[Fp8CompileCallback()])     compiles, reports
    Fp8CompileCallback(scaler=LossScaler()).attach(trainer)         and scales losses; before trainer.train()

Trainer and accelerate take a backend only from enums of their own, so the model is compiled in place: its class, its keys in
checkpoints and what Trainer reads of its signature stay. ``transformers`` is not imported. Trainer calls events by name, and
an event that has no method here does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

import fp8compile
from fp8compile import _torch as private
from fp8compile._text import human
from fp8compile.reporting.report import Report
from fp8compile.reporting.text import kind_of_codes
from fp8compile.tools.checking.check import Check
from fp8compile.tools.compiled_module import active_recipes

_log = logging.getLogger("fp8compile")
COMPILED_BY_TRAINER = (
    "TrainingArguments(torch_compile=True) compiles the model with {backend!r}: leave torch_compile and "
    "torch_compile_backend out, and Fp8CompileCallback compiles it with 'fp8compile'"
)
NOT_ATTACHED = (
    "Fp8CompileCallback has a scaler that the Trainer does not use: call callback.attach(trainer) before trainer.train(), "
    "instead of callbacks=[callback]"
)
CLIPS_SCALED = (
    "max_grad_norm={norm} would clip gradients that are still scaled: accelerate unscales them only where it runs FP16 "
    "itself, and here its mixed precision is {precision!r} on {device!r}. Set fp16=True on a GPU, or max_grad_norm=0"
)


class Fp8CompileCallback:
    """A ``transformers.TrainerCallback`` that turns fp8compile on.

    Where training begins it compiles the model in place, unless it is compiled already, or fp8compile has compiled a part of
    it. After the first optimizer step it logs what was compiled under "fp8compile", and warns where that is nothing.
    Of Trainer's logs the first entry has ``fp8_matmuls``, ``saved_bytes`` and ``saved_bytes_plain``; with a scaler each has
    ``loss_scale`` and ``skipped_steps``.

    Args:
        options: as in ``torch.compile(options=...)``: a preset, fields of Recipe.
        scaler: the loss scaler for ``fp16=True``; it needs ``attach``.
        check: a batch as the model's keyword arguments, on its device: ``fp8compile.check`` compares its gradients with the
            exact ones where training begins, and a warning has the repair where one is off.
        show: print the report after the first optimizer step.

    Attributes:
        report: the report after the first optimizer step; None before it, and where nothing was compiled.
        checked: what ``check`` found; None without one.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        scaler: fp8compile.amp.LossScaler | None = None,
        check: Mapping[str, Any] | None = None,
        show: bool = False,
    ) -> None:
        self.options, self.scaler, self.batch, self.show = options, scaler, check, show
        self.report: Report | None = None
        self.checked: Check | None = None
        self._looked = self._reported = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def attach(self, trainer: Any) -> None:
        """Add this callback to a Trainer, before those that write its logs, and make ``scaler`` the Trainer's.

        Args:
            trainer: a ``transformers.Trainer`` that has not begun to train.

        Raises:
            ValueError: a scaler where accelerate would clip gradients that are still scaled.
        """
        if self.scaler is not None:
            accelerator, norm = trainer.accelerator, trainer.args.max_grad_norm
            if norm and not (accelerator.native_amp and accelerator.mixed_precision == "fp16"):
                precision, device = accelerator.mixed_precision, accelerator.device.type
                raise ValueError(CLIPS_SCALED.format(norm=norm, precision=precision, device=device))
            accelerator.scaler = self.scaler
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        """Compile the model, and check its gradients.

        Raises:
            ValueError: Trainer compiles the model itself, or does not use the scaler.
        """
        if args.torch_compile:
            raise ValueError(COMPILED_BY_TRAINER.format(backend=args.torch_compile_backend))
        if self.scaler is not None and getattr(kwargs.get("optimizer"), "scaler", None) is not self.scaler:
            raise ValueError(NOT_ATTACHED)
        if private.backend_name(model) is None and not active_recipes(model):
            model.compile(backend="fp8compile", options=None if self.options is None else dict(self.options))
        self._looked = self._reported = False
        if self.batch is not None:
            self._check(model, self.batch)

    def _check(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        was_training = model.training
        self.checked = fp8compile.check(model.train(), dict(batch))
        model.train(was_training)
        if not self.checked.ok:
            _log.warning("%s", self.checked)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        """After the first step: log what was compiled, or warn that nothing was."""
        if self._looked:
            return
        self._looked = True
        try:
            self.report = fp8compile.report(model)
        except ValueError as error:
            self.report = None
            _log.warning("%s", error)
            return
        if state.is_world_process_zero:
            _log.info("%s", summary(self.report))
            if self.show:
                print(self.report)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **kwargs: Any) -> None:
        """Put the figures into what Trainer logs and keeps."""
        found: dict[str, float] = {}
        if self.scaler is not None:
            found |= {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.scaler.skipped}
        if self.report is not None and not self._reported:
            self._reported = True
            found |= {
                "fp8_matmuls": len(self.report.linears),
                "saved_bytes": self.report.saved_bytes,
                "saved_bytes_plain": self.report.saved_bytes_plain,
            }
        for where in (logs, state.log_history[-1]):
            where.update(found)


def summary(report: Report) -> str:
    """The report in one line: training graphs, matmuls of linears in FP8 or INT8 of all, bytes saved for backward."""
    graphs = sum(graph.kind == "training" for graph in report.graphs)
    done, left = len(report.linears), len(report.notes.skipped("linear"))
    saved = f"{human(report.saved_bytes)} saved for backward (plain Inductor {human(report.saved_bytes_plain)})"
    linears = f"{done} of {done + left} matmuls of linears in {kind_of_codes(report.notes)}"
    return f"{graphs} training graph{'s' * (graphs != 1)}, {linears}, {saved}"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An event that concerns nobody here."""
