"""``fp8compile.extras.watching.watch``: a line of JSON for each step of a training run, at no measurable cost.

    a step ends     with ``scaler.update()``; without a scaler, with the optimizer's ``step``
    it is written   when the next one ends, or later where the device is behind: nothing waits for a device

A fault of the watcher ends the watching with a warning, never the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8compile._arguments import is_count
from fp8compile.amp.scaler import LossScaler
from fp8compile.extras.watching.header import header_of, rank_and_world
from fp8compile.extras.watching.lines import scalars_of
from fp8compile.extras.watching.memory import device_of, memory_of
from fp8compile.extras.watching.operands import OperandCollector
from fp8compile.extras.watching.record import Logged, StepRecord, late_number
from fp8compile.extras.watching.run_file import RunFile
from fp8compile.extras.watching.sends import Send, Sends
from fp8compile.extras.watching.states import Sample, Sampler
from fp8compile.extras.watching.statistics import Statistics

_log = logging.getLogger("fp8compile")
MOST_PENDING = 16  # steps that may wait for the device; then the oldest is waited for
GONE = "the model that fp8compile.extras.watching.watch was given exists no longer: keep it, for example by a name"
ENDED = "fp8compile.extras.watching.watch failed at step %d and watches no longer; training goes on"


def watch(
    model: nn.Module,
    scaler: LossScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    folder: str | os.PathLike[str] = "run",
    *,
    to: Iterable[str | Send] = (),
    first_step: int | None = None,
    sqnr_every: int = 100,
) -> Watcher:
    """Write down each training step of ``model`` from now on, until ``close()``; ``fp8compile watch run/`` draws it.

    A step's line has its time, the loss that ``log`` was given, the loss scale and whether the step was skipped, the headroom
    of observed values and of FP8 operands with a delayed scale, what was clipped of these, tokens per second, memory, and
    now and then the SQNR of an optimizer's states. Where a value is inf or NaN it has the layers, first to last.

    Args:
        model: compiled or not.
        scaler: ends steps by its ``update()``. Without one, or with one that is not enabled, they end with the optimizer's
            ``step``; statistics that a scaler has taken over are then left out, which is said once.
        optimizer: whose steps count, and whose states are sampled; None: the first one that steps a parameter of ``model``.
        folder: gets one file a rank, ``rank0.jsonl``; what is in it stays.
        to: where the numbers go too: "tensorboard", "wandb", "trackio", or functions of (step, {name: number}). Of rank 0.
        first_step: the number of the next step. None: the scaler's updates, or what the optimizer has counted, go on.
        sqnr_every: at most one step in so many takes a sample of an optimizer's states.

    Raises:
        ValueError: an argument that is not as above.
        ImportError: a package that ``to`` names is not installed.
    """
    _check(model, scaler, optimizer, first_step, sqnr_every)
    return Watcher(model, scaler, optimizer, folder, to, first_step, sqnr_every)


class Watcher:
    """What ``watch`` returns; a context manager that closes itself.

    Attributes:
        own_seconds: seconds that the host spent in it.
    """

    def __init__(
        self,
        model: nn.Module,
        scaler: LossScaler | None,
        optimizer: torch.optim.Optimizer | None,
        folder: str | os.PathLike[str],
        to: Iterable[str | Send],
        first_step: int | None,
        sqnr_every: int,
    ) -> None:
        self._model, self._scaler = weakref.ref(model), scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._rank, _ = rank_and_world()
        self._file, self._sends = RunFile(folder, self._rank), Sends(to if self._rank == 0 else (), folder)
        self._statistics = Statistics(model, self._scaler is not None)
        self._operands, self._sampler = OperandCollector(model), Sampler(sqnr_every)
        self._device = device_of(model)
        self._number = first_step - 1 if first_step is not None else None  # of the last step that ended
        self._begun = self._closed = False
        self._pending: deque[StepRecord] = deque()
        self._logged = Logged()
        self._logs_behind: bool | None = None
        self._sample: Sample | None = None
        self._at = time.perf_counter()
        self._last: dict[str, Any] = {}
        self.own_seconds = 0.0
        self._undo = self._hook()
        atexit.register(self.close)

    def _hook(self) -> list[Callable[[], Any]]:
        disabled = torch.compiler.disable  # a compiled step traces its hooks
        hooks = [
            register_optimizer_step_pre_hook(disabled(self._before_step)),  # type: ignore[no-untyped-call]
            register_optimizer_step_post_hook(disabled(self._after_step)),  # type: ignore[no-untyped-call]
        ]
        if self._scaler is not None:
            self._scaler._ledger.listeners.append(self)
        return [hook.remove for hook in hooks]

    # ------------------------------------------------------------------------------------------------- from outside

    def log(self, loss: Any = None, tokens: int | None = None, **others: Any) -> None:
        """Add to a step's line. Called before the first step ends, and then each time, it is about the step under way;
        called first behind it, about the step that has just ended. Tensors are copied and read later.

        Args:
            loss: a number or a tensor of one element; of several in a step the mean counts.
            tokens: of the step; several add up.
            others: other numbers by name.

        Raises:
            ValueError: something that is not one number.
        """
        began = time.perf_counter()
        if self._logs_behind is None:
            self._logs_behind = self._begun
        into = self._pending[-1].logged if self._logs_behind and self._pending else self._logged
        if loss is not None:
            into.losses.append(late_number(loss))
        if tokens is not None:
            into.tokens += int(tokens)
        into.others.update({name: late_number(value) for name, value in others.items()})
        self.own_seconds += time.perf_counter() - began

    def step(self) -> None:
        """End a step by hand, where neither a scaler nor an optimizer's ``step`` does (released gradients)."""
        self._guarded(self._end, None)

    def scalars(self) -> dict[str, float]:
        """The numbers of the last step that was written, by name; {} before the first."""
        return scalars_of(self._last)

    def close(self) -> None:
        """Write what is under way, and watch no longer. Waits for the device."""
        if self._closed:
            return
        if self._scaler is not None:
            self._guarded(self._scaler._ledger.read)
        self._guarded(self._write, True)
        self._stop()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- hooks and listeners

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._is_ours(optimizer):
            self._guarded(self._take_sample, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._scaler is None and self._is_ours(optimizer):
            self._guarded(self._end, None)

    def ended(self, update: int) -> None:
        """The scaler has ended an update."""
        self._guarded(self._end, update)

    def taken(self, update: int, record: Mapping[str, float]) -> None:
        """What came of an update has reached the host."""
        for step in self._pending:
            if step.update == update:
                step.outcome = dict(record)

    def _guarded(self, do: Callable[..., Any], *args: Any) -> None:
        if self._closed:
            return
        began = time.perf_counter()
        try:
            do(*args)
        except Exception:
            _log.warning(ENDED, self._number or 0, exc_info=True)
            self._stop()
        self.own_seconds += time.perf_counter() - began

    def _stop(self) -> None:
        self._closed = True
        for undo in self._undo:
            undo()
        if self._scaler is not None and self in self._scaler._ledger.listeners:
            self._scaler._ledger.listeners.remove(self)
        self._file.close()
        atexit.unregister(self.close)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is the optimizer whose steps count. Where there is none, or it is gone, the next one that steps a
        parameter of the model becomes it."""
        ours = None if self._optimizer is None else self._optimizer()
        if ours is None and (model := self._model()) is not None:
            own = set(map(id, model.parameters()))
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                self._optimizer = weakref.ref(optimizer)
        return self._optimizer is not None and self._optimizer() is optimizer

    # -------------------------------------------------------------------------------------------------------- a step

    def _take_sample(self, optimizer: torch.optim.Optimizer) -> None:
        self._sample = self._sampler.sample((self._number or 0) + 1, optimizer) or self._sample

    def _end(self, update: int | None) -> None:
        """A step has ended: take note of it, and write those before it that have arrived."""
        self._begin(update)
        number = self._number = self._next_number(update)
        now = time.perf_counter()
        known: dict[str, Any] = memory_of(self._device)
        if self._scaler is not None and self._scaler._idle:
            known |= {"scale": 1.0, "skipped": False}
        step = StepRecord(number, now - self._at if self._begun else None, known, self._logged, update=update)
        step.observed, step.operands, step.sample = self._statistics.collect(), self._operands.collect(), self._sample
        if self._statistics.remarks:
            step.known["remark"], self._statistics.remarks = "; ".join(self._statistics.remarks), []
        self._at, self._logged, self._sample, self._begun = now, Logged(), None, True
        self._write(False)
        self._pending.append(step)

    def _begin(self, update: int | None) -> None:
        if not self._begun:
            model = self._model()
            if model is None:
                raise RuntimeError(GONE)
            optimizer = None if self._optimizer is None else self._optimizer()
            self._file.begin(header_of(model, self._scaler, optimizer))

    def _next_number(self, update: int | None) -> int:
        if self._number is not None:
            return self._number + 1
        if update is not None:
            return update
        optimizer = None if self._optimizer is None else self._optimizer()
        return max(1, _steps_counted(optimizer))

    def _write(self, all_of_them: bool) -> None:
        """Write the oldest steps, as far as they have arrived."""
        while self._pending and (all_of_them or len(self._pending) > MOST_PENDING or self._is_complete()):
            step = self._pending.popleft()
            self._last = step.record(self._statistics)
            self._file.add(self._last)
            self._sends.send(self._last)

    def _is_complete(self) -> bool:
        step = self._pending[0]
        return step.arrived and (step.update is None or step.outcome is not None or "scale" in step.known)


def _steps_counted(optimizer: torch.optim.Optimizer | None) -> int:
    """How many steps an optimizer's states have counted; 0 where they count none. Waits for the device, once in a run."""
    states = [] if optimizer is None else optimizer.state.values()
    counts = [state["step"] for state in states if isinstance(state, Mapping) and "step" in state]
    return max((int(each) for each in counts[:1]), default=0)


def _check(model: object, scaler: object, optimizer: object, first_step: Any, sqnr_every: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"watch takes the model that is trained, not {model!r:.80}")
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise ValueError(f"watch takes a fp8compile.amp.LossScaler, not {type(scaler).__name__}: LossScaler('dynamic') is "
                         "torch.amp.GradScaler, number for number; or leave scaler out and log(scale=...)")  # fmt: skip
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"watch takes a torch optimizer, not {optimizer!r:.80}")
    for name, value in (("first_step", first_step), ("sqnr_every", sqnr_every)):
        if value is not None and (not is_count(value) or value < 1):
            raise ValueError(f"watch({name}={value!r}): a whole number of 1 or more is needed")
