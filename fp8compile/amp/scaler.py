"""Loss scaling: torch.amp.GradScaler's interface, with a scale that follows histograms of gradients.

    scale(loss) -> backward -> [unscale_ -> clip_grad_norm_] -> step -> update

    histogram  gradients clipped to +-65504, no step skipped but for NaN; halved at once, doubled after 64 updates   (default)
    dynamic    torch.amp.GradScaler, number for number; also for FP16 parameters
    static     the scale stays

Source: Graphcore, "Automatic loss scaling" (numerics/histogram.py); torch.amp.GradScaler.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile._distributed import sum_over_ranks
from fp8compile.amp.autograd_graph import has_fp16
from fp8compile.amp.binding import Binding
from fp8compile.amp.closures import EvaluatedClosure, taken_out
from fp8compile.amp.collapse import NOTHING_OBSERVED, Limits, LossScaleCollapse
from fp8compile.amp.copying import Copyable
from fp8compile.amp.histogram import Counter
from fp8compile.amp.iteration import READY, STEPPED, Iteration, OptimizerStage
from fp8compile.amp.ledger import Ledger, tensorboard
from fp8compile.amp.losses import flat, given_scale, materialised, scaled
from fp8compile.amp.options import CAPPED_WARNING, HISTOGRAM, NO_FP16, ScalerOptions, check_are
from fp8compile.amp.policies import PolicyState, UpdateStats
from fp8compile.amp.state import loaded, packed
from fp8compile.observe.overflow_report import overflow_report
from fp8compile.observe.records import Observations

_log = logging.getLogger("fp8compile")


class LossScaler(Copyable):
    """A loss scale, and what goes with it.

    Args:
        mode: "histogram", "dynamic" or "static".
        init_scale: by default 1 (histogram), 2**16 (dynamic), 2**10 (static).
        growth_factor, backoff_factor: of dynamic; as in torch.amp.GradScaler.
        growth_interval: updates in a row that must be good before the scale is doubled: of dynamic as in
            torch.amp.GradScaler, 2000; of histogram once the scale has been halved for the first time, 64 (1: Graphcore's
            rule, which with fewer than 10^7 gradients a step follows every single one: ``policies``).
        period, threshold: of histogram: updates per decision; the fraction of large gradients above which to halve.
        floor, ceiling: of the scale; by default 2**-24 and 2**24 in histogram mode, none else.
        kinds, modules: which statistics make the histogram: "weight", "activation"; fnmatch patterns on module paths.
        collapse: whether ``LossScaleCollapse`` is raised; by default in histogram mode.
        limits: what a collapse and a surge are.
        process_group: ranks that decide together; None: all, where torch.distributed is initialised.
        writer: a TensorBoard SummaryWriter (or anything with ``add_scalar``), or a folder to make one for.
        enabled: False: all of it does nothing.

    Raises:
        ValueError: an option that makes no sense.
    """

    def __init__(
        self,
        mode: str = HISTOGRAM,
        *,
        collapse: bool | None = None,
        limits: Limits | None = None,
        process_group: dist.ProcessGroup | None = None,
        writer: Any = None,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        check_are(collapse, limits, process_group, enabled, options)
        chosen = ScalerOptions(mode, **options)
        raises = mode == HISTOGRAM if collapse is None else collapse
        self._begin(chosen, Ledger(limits or Limits(), raises, tensorboard(writer)), process_group, enabled)

    def _begin(self, options: ScalerOptions, ledger: Ledger, group: dist.ProcessGroup | None, enabled: bool) -> None:
        self.options, self.mode, self.process_group = options, options.mode, group
        self._ledger, self._enabled = ledger, enabled
        self._policy = options.policy()
        self._counter = Counter(options.kinds, options.modules)
        self._binding = Binding(saturates=options.mode == HISTOGRAM)
        self._state: PolicyState | None = None  # made on the device of the first loss
        self._restored: dict[str, Any] | None = None  # its numbers, until then
        self._updates = 0
        self._idle: bool | None = None  # no FP16 gradient: nothing to do
        self._iteration = Iteration(options.mode == HISTOGRAM)

    @property
    def observations(self) -> list[Observations]:
        """The observations bound to it: of its optimizers' parameters, and of the compiled graphs behind its losses."""
        return self._binding.observations

    @property
    def history(self) -> list[tuple[int, float]]:
        """``(update, scale after it)``, oldest first; waits for the device."""
        self._ledger.read()
        return list(self._ledger.history)

    @property
    def skipped(self) -> int:
        """Updates in which a step was skipped; waits for the device."""
        self._ledger.read()
        return self._ledger.skipped

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """The loss scale; 1 where there is nothing to scale. Waits for the device."""
        if not self._enabled or self._idle:
            return 1.0
        if self._state is None:
            return float(self._restored["scale"]) if self._restored else self.options.start
        return float(self._state.scale.item())

    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale.

        Args:
            outputs: a tensor, or an iterable (of iterables) of tensors, which may be on several devices.

        Raises:
            ValueError: an output that is not a tensor, or not of a real floating-point dtype.
        """
        if not self._enabled:
            return outputs
        outputs = materialised(outputs)
        losses = flat(outputs)
        if not losses:
            return outputs
        if self._iteration.interrupted:
            self._iteration = Iteration(self.mode == HISTOGRAM)
        if self._state is None:
            self._state = PolicyState.start(self.options.start, losses[0].device)
            if self._restored is not None:
                self._state, self._restored = self._state.filled(**self._restored), None
        self._binding.by_losses(losses)
        if self.mode == HISTOGRAM:
            self._look_for_fp16([loss for loss in losses if loss.requires_grad])
        self._iteration.losses(losses, self._state.scale.device)
        return outputs if self._idle else scaled(outputs, self._state.scale)

    def _look_for_fp16(self, losses: Sequence[Tensor]) -> None:
        """Find out whether there is anything to scale. For a loss in FP16, lower the ceiling to one that FP16 has."""
        if self._idle is not False and not self._iteration.fp16 and losses:
            observed = any(row.dtype == "f16" for each in self.observations for row in each.rows)
            self._iteration.fp16 = observed or has_fp16(losses)
        if self._idle is None and losses:
            self._idle = not self._iteration.fp16
            if self._idle:
                _log.warning(NO_FP16)
        capped = self.options.for_fp16_loss()
        if capped.bounds != self.options.bounds and any(loss.dtype == torch.float16 for loss in losses):
            _log.warning(CAPPED_WARNING, capped.bounds[1], self.options.bounds[1])
            self._use(capped)

    def _use(self, options: ScalerOptions) -> None:
        self.options, self._policy = options, options.policy()
        if self._state is not None:
            self._state = replace(self._state, scale=self._state.scale.clamp(*options.bounds))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place; before clipping by norm, say. No host sync.

        FP16 gradients are FP32 afterwards if the optimizer is one of fp8compile.optim; else values below 2**-25 become 0.

        Raises:
            RuntimeError: called twice, or after ``step``; no gradient; ``scale`` was not called since the last update.
            ValueError: a complex gradient.
        """
        if not self._enabled or self._idle:
            return
        self._iteration.check_unscale(self._iteration.stage(optimizer))
        assert self._state is not None
        self._iteration.unscale(optimizer, self._state.scale, self._binding, self._counter)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that was not done, and step unless the gradients are inf or NaN (histogram mode: NaN). One host sync.

        Args:
            optimizer: its gradients are checked, and its ``step`` is called.
            args, kwargs: for ``optimizer.step``. A closure is evaluated once before, so that a bad step can be skipped; it
                calls ``scaler.scale(loss).backward()``, may call ``unscale_``, and returns the loss.

        Raises:
            LossScaleCollapse: the updates until now show a collapse; nothing is stepped (see ``acknowledge``).
            RuntimeError: called twice since the last update; no gradient; no loss was scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        stage = self._iteration.stage(optimizer)
        if stage.at == STEPPED:
            raise RuntimeError("step() has already been called since the last update().")

        def finish() -> None:
            if stage.at == READY:
                self.unscale_(optimizer)

        closure, args, kwargs = taken_out(args, kwargs)
        if closure is not None:
            args = (EvaluatedClosure(closure, stage, finish, lambda: self._is_bad(stage)), *args)
        finish()
        bad = self._is_bad(stage)
        self._iteration.interrupted = False
        result = None if bad else optimizer.step(*args, **kwargs)
        stage.at = STEPPED
        return result

    def _is_bad(self, stage: OptimizerStage) -> bool:
        """Whether any rank found inf or NaN. The host waits here, and learns the outcome of the updates before."""
        if self._idle:
            return False
        (found,) = self._ledger.read(sum_over_ranks(stage.found_ever(), self.process_group))
        self._raise_if_collapsed()
        return found > 0

    def _raise_if_collapsed(self) -> None:
        if self._ledger.collapse is not None:
            self._iteration.interrupted = True
            report = str(overflow_report(self)) if self.observations else NOTHING_OBSERVED
            raise LossScaleCollapse(*self._ledger.collapse, self.observations, report)

    def acknowledge(self) -> str | None:
        """Train on after a ``LossScaleCollapse``: it is no longer raised. The watchdog starts afresh; no second warm-up.

        The step that raised it did nothing: call it again, or leave it out by calling ``update()`` or the next ``scale()``.
        The cause remains: lower the learning rate, skip the data, or go back to a checkpoint. Returns what the collapse
        was, which is also logged; None where there was none.
        """
        return self._ledger.acknowledge(self._updates)

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End an iteration: the next scale, from what was seen since the last update on all ranks. No host sync.

        Args:
            new_scale: the next scale itself; within floor and ceiling.

        Raises:
            RuntimeError: no ``unscale_`` or ``step`` since the last update.
            ValueError: a pattern in ``modules`` that matches nothing; a new scale that is not positive and finite.
        """
        if not self._enabled:
            return
        if self._idle:
            self._idle = not self._iteration.fp16
            self._updates += 1
            self._binding.close(self._updates)
            self._iteration = Iteration(self.mode == HISTOGRAM)
            self._ledger.end(self._updates)
            return
        if self._state is None or self._iteration.is_empty:
            raise RuntimeError("update() without step() or unscale_() before: nothing was seen since the last one")
        given = None if new_scale is None else given_scale(new_scale, self._state.scale).clamp(*self.options.bounds)
        self._updates += 1
        seen = self._close(self._state.scale.device)
        state, verdict = self._policy(self._state, seen)
        if given is not None:
            state, verdict = replace(self._state, scale=given), torch.zeros_like(verdict)
        self._state = state
        self._ledger.add(self._updates, state.scale, verdict, seen)
        self._iteration = Iteration(self.mode == HISTOGRAM)
        self._ledger.end(self._updates)

    def _close(self, device: torch.device) -> UpdateStats:
        for each, seen in self._binding.close(self._updates):
            self._iteration.closed_counts.append(self._counter.of_rows(each, seen).to(device, non_blocking=True))
        if self.mode == HISTOGRAM:
            self._counter.check(self.observations)
        return self._iteration.sum_up(device, self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: version, mode, scale, history, counters; {} of a scaler that is not enabled. After ``update``."""
        if not self._enabled:
            return {}
        self._ledger.read()
        ledger = self._ledger.state()
        numbers = self._state.numbers() if self._state is not None else self._restored
        numbers = numbers or {"scale": self.options.start, "since": 0, "small": 0.0, "large": 0.0, "quiet": -1}
        return packed(self.options, {**numbers, "updates": self._updates, "idle": self._idle, **ledger})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, except ``kinds``, ``modules`` and whether a collapse is raised.

        Raises:
            ValueError: a state of another version or mode, an empty or a damaged one; the scaler is then unchanged.
        """
        if not self._enabled:
            return
        state = loaded(state_dict, self.options)
        self._ledger.restore(state.history, state.skipped, state.watchdog)
        self._use(state.options)
        self._restored, self._state = state.numbers, None  # made again on the next loss's device
        self._updates, self._idle = state.updates, state.idle
        self._iteration = Iteration(self.mode == HISTOGRAM)
