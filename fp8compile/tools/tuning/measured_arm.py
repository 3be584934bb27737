"""Steps of one recipe: the first, which compile; one whose memory is measured; then turns, which are timed.

A turn is as many steps as take TURN_SECONDS with the first recipe that runs, at most MOST_STEPS: a GPU is waited for once a
turn, and a step follows a step of the same recipe. What fails ends this recipe's part alone, and its note says why.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8compile._messages import cause
from fp8compile.compiler.inputs import cuda_devices
from fp8compile.tools.step_memory import measured_peak, saved_bytes
from fp8compile.tools.trial_step import default_loss, one_step
from fp8compile.tools.tuning.arms import TunedArm
from fp8compile.tools.tuning.compiled_arm import CompiledArm
from fp8compile.tools.tuning.gradients import ExactStep
from fp8compile.tools.tuning.rows import TunedRow, beside, summary

OUT_OF_MEMORY, NOT_REACHED = "out of memory", "not reached"
TURN_SECONDS, MOST_STEPS = 0.1, 10
FIRST_STEPS = 2  # delayed scales: the first step measures, node by node; the second runs generated code


@dataclass(frozen=True)
class TunedStep:
    """What every recipe runs: a model, what it is called with, its loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there with or without a step."""
        given = [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *given]

    @property
    def cuda(self) -> list[int]:
        return cuda_devices(self.tensors)

    def run(self, model: Callable[..., Any]) -> tuple[Tensor | None, ...]:
        """The gradients of one step of ``model``: this model, or what it was compiled to."""
        return one_step(model, self.args, self.kwargs, self.loss)

    def kept_by(self, model: Callable[..., Any]) -> int:
        """The bytes that a forward keeps for its backward."""

        def forward() -> Tensor:
            scalar = (self.loss or default_loss)(model(*self.args, **self.kwargs))
            assert scalar is not None, "the model was run before"
            return scalar

        return saved_bytes(forward, self.tensors)

    def wait(self) -> None:
        """Until the GPUs have done what they were told."""
        for device in self.cuda:
            torch.cuda.synchronize(device)


class MeasuredArm:
    """One recipe and what is known of it so far."""

    def __init__(self, arm: TunedArm, step: TunedStep) -> None:
        self.arm, self.step = arm, step
        self.compiled = CompiledArm(step.model, arm)
        self.known: dict[str, Any] = {}
        self.turns: dict[int, float] = {}  # seconds of a step by round
        self.works, self.note = False, NOT_REACHED

    def begin(self, exact: ExactStep | None) -> None:
        """Compare its gradients with the exact ones, compile it, and measure the memory of a step."""
        self.note = ""
        self.works = self._can(lambda: self._compare(exact)) and self._can(self._first_steps)

    def turn(self, number: int, steps: int) -> None:
        """Its part of a round."""
        self.works = self._can(lambda: self.turns.update({number: self.timed(steps)}))

    def timed(self, steps: int) -> float:
        """Seconds of a step, of several in a row."""
        self.step.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step.run(self.compiled.model)
        self.step.wait()
        return (time.perf_counter() - start) / steps

    def row(self, plain: Mapping[int, float]) -> TunedRow:
        """What is known, beside plain Inductor's turns."""
        name, recipe, rounds = self.arm.name, self.arm.recipe, len(self.turns)
        times = (*summary([*self.turns.values()]), *beside(self.turns, plain))
        return TunedRow(name, recipe, *times, rounds=rounds, note=self.note, **self.known)

    def _compare(self, exact: ExactStep | None) -> None:
        if self.arm.is_plain:
            self.known |= {"db": math.inf, "below": 0}  # what the others are compared with
        elif exact is not None:
            self.known["db"], self.known["below"] = exact.compared(self.arm.recipe)

    def _first_steps(self) -> None:
        self.known["first_seconds"] = FIRST_STEPS * self.timed(FIRST_STEPS)
        self.known["kept"] = self.step.kept_by(self.compiled.model)
        self.known["peak"] = measured_peak(lambda: self.step.run(self.compiled.model), self.step.cuda)

    def _can(self, do: Callable[[], object]) -> bool:
        """Whether it could be done; if not, what it held is dropped, and its note says why."""
        try:
            do()
        except Exception as error:
            self.note = why_not(error)
        else:
            return True
        self.turns.clear()
        self.compiled.forget()
        give_memory_back()  # here: an exception holds the frames, and they hold what did not fit
        return False


def why_not(error: BaseException) -> str:
    """An error as the note of a row."""
    return OUT_OF_MEMORY if ran_out_of_memory(error) else f"failed: {cause(error)}"


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no memory left."""
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(inner, RuntimeError) and "can't allocate memory" in str(inner)  # the allocator of CPUs


def give_memory_back() -> None:
    """Collect what failed, and what the allocator of GPUs keeps of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
