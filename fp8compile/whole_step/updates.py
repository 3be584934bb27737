"""What an optimizer has its part of a whole step do: for each parameter a pure update and the tensors that it takes.

    plan({"param", "grad", "step", "numbers", states ...}) -> new values of the tensors of the same names

fp8compile.optim's optimizers have such plans. The step of any other is captured, and goes over its states as it keeps them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile._distributed import is_sharded
from fp8compile.linears.packed_weights import Codes
from fp8compile.optim.base import EncodedOptimizer
from fp8compile.optim.captured_update import STEP, CapturedUpdate
from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.placement import EXACT
from fp8compile.optim.plan import Tensors, UpdatePlan
from fp8compile.optim.step_numbers import StepNumbers
from fp8compile.whole_step.codes import Coded

Group = dict[str, Any]
SIXTEEN_BITS = (
    "torch.optim.{0} rounds each operation on {1} parameters: use fp8compile.optim.{0}, which computes in float32"
)
IN_PYTHON = (
    "{}'s state {!r} is a Python number, which no graph changes: fp8compile.optim.compress(optimizer) keeps a tensor"
)
HOOKED = "the optimizer has hooks on its step, which a graph would not call"
NO_CODES = "torch.optim.{0} writes no codes: use fp8compile.optim.{0} with weight_codes=True"
NOT_ASKED = "the optimizer has weight_codes=False"
OTHER_LAYOUTS = "another graph takes other codes of the same weight"


class Updates(Protocol):
    """An optimizer as a whole step sees it."""

    optimizer: torch.optim.Optimizer

    def why_not(self) -> str | None:
        """Why its updates cannot be part of a graph; None where they can."""

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Give each parameter its state, if it has none yet."""

    def options(self) -> Hashable:
        """What all plans depend on. Learning rates and other numbers are no part of it."""

    def held(self, p: Tensor) -> list[Tensor]:
        """The tensors that ``tensors`` is made of: as long as they are the same objects, so is its result."""

    def plan(self, p: Tensor) -> UpdatePlan: ...

    def tensors(self, p: Tensor) -> Tensors:
        """What the plan takes, but for parameter, gradient and step; the same names at each call."""

    def step_alone(self) -> None:
        """``optimizer.step()``, as if no state had begun here."""

    def codes(self, p: Tensor, made: Codes, dtype: torch.dtype) -> Coded | str:
        """What its update takes to write the codes of the new weight over these, encoded from this dtype; or why it writes
        none."""

    def leave(self, p: Tensor, coded: Coded) -> None:
        """Behind the graph: leave the codes where graphs look for them."""

    def updated(self, parameters: Sequence[Tensor]) -> None:
        """Behind the graph, and behind what tells of new values: count the step. The parameters are as it has left them."""

    def steps(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The number of this step for each parameter, 0-d; a graph that fails is no step. The groups' numbers are made
        current."""


def updates_of(optimizer: torch.optim.Optimizer) -> Updates:
    """Raises ValueError for an optimizer whose step is not captured."""
    if isinstance(optimizer, EncodedOptimizer):
        return OurUpdates(optimizer)
    stock = StockUpdates(optimizer)
    stock._updates.check()
    for p in parameters_of(optimizer):
        if numbers := stock._update(p).in_python:
            raise ValueError(IN_PYTHON.format(type(optimizer).__name__, numbers[0]))
    return stock


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def traits_of(optimizer: torch.optim.Optimizer) -> Hashable:
    """What a whole step is captured for: which parameters, their dtypes, and whether hooks wait for gradients or steps."""
    return why_hooked(optimizer), tuple((id(p), p.dtype, is_hooked(p)) for p in parameters_of(optimizer))


def is_hooked(p: Tensor) -> bool:
    """Whether something is called when its gradient is made."""
    return bool(p._backward_hooks) or bool(getattr(p, "_post_accumulate_grad_hooks", None))


@contextmanager
def unless_it_fails(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """States and gradients that begin inside are gone again where it raises."""
    begun = {p for p, state in optimizer.state.items() if state}
    without = [p for p in parameters_of(optimizer) if p.grad is None]
    try:
        yield
    except BaseException:
        for p in [p for p in optimizer.state if p not in begun]:
            del optimizer.state[p]
        for p in without:
            p.grad = None
        raise


def groups_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[int, Group]]:
    """The number and the group of each parameter."""
    every = ((group, p) for group in optimizer.param_groups for p in group["params"])
    return {p: (number, group) for number, (group, p) in enumerate(every)}


def why_hooked(optimizer: torch.optim.Optimizer) -> str | None:
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = (hook for hooks in private.global_step_hooks for hook in hooks.values())
    return HOOKED if any(own) or not all(map(_is_ours, of_all)) else None


def _is_ours(hook: Any) -> bool:
    """Whether a hook on the steps of all optimizers is this package's: what these do, a whole step does itself."""
    return str(getattr(hook, "__module__", "")).startswith(f"{__name__.split('.')[0]}.")


class OurUpdates:
    """Of fp8compile.optim's optimizers."""

    def __init__(self, optimizer: EncodedOptimizer) -> None:
        self.optimizer: Any = optimizer
        self._groups = groups_of(optimizer)

    def why_not(self) -> str | None:
        return why_hooked(self.optimizer)

    def begin(self, parameters: Sequence[Tensor]) -> None:
        self._groups = groups_of(self.optimizer)  # loading a state makes new ones
        self.optimizer._updates.check()
        self.optimizer._edits.take_over(parameters, self.optimizer.state)
        for p in parameters:
            self.optimizer._start(p, self._groups[p][1])

    def options(self) -> Hashable:
        of = self.optimizer
        return tuple((of._updates.version(group), group["master"]) for group in of.param_groups)

    def held(self, p: Tensor) -> list[Tensor]:
        return [*self.optimizer.state[p].values(), self.optimizer.numbers_of(p, self._groups[p][1])]

    def plan(self, p: Tensor) -> UpdatePlan:
        plan: UpdatePlan = self.optimizer.plan_of(p, self._groups[p][1])
        return plan

    def tensors(self, p: Tensor) -> Tensors:
        number, group = self._groups[p]
        state = self.optimizer.state[p]
        made: Tensors = self.optimizer._kept(number, p, group, state["step"])
        return {name: tensor for name, tensor in made.items() if name != "step"}

    def step_alone(self) -> None:
        self.optimizer.step()

    def codes(self, p: Tensor, made: Codes, dtype: torch.dtype) -> Coded | str:
        writer, group = self.optimizer._writer, self._groups[p][1]
        found = writer.over(p, group, made, dtype)
        if found is None:
            return writer.why_not(p, group) or OTHER_LAYOUTS if self.optimizer.weight_codes else NOT_ASKED
        return Coded(*found)

    def leave(self, p: Tensor, coded: Coded) -> None:
        self.optimizer._writer.written_over(p, coded.wanted, coded.tensors)

    def updated(self, parameters: Sequence[Tensor]) -> None:
        torch._foreach_add_(self._counts(parameters), 1)
        self.optimizer._edits.leave(parameters, self.optimizer.state)
        self.optimizer._numbers.leave()

    def steps(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        self.optimizer._refresh_numbers([(*self._groups[p], p) for p in parameters])
        return [*torch._foreach_add(self._counts(parameters), 1)]

    def _counts(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [self.optimizer.state[p]["step"] for p in parameters]


class StockUpdates:
    """Of any other optimizer whose step is captured, with its own states, which other code may read and load as before."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = groups_of(optimizer)
        self._updates, self._numbers = CapturedUpdates(optimizer), StepNumbers()
        self._counted: dict[Tensor, Tensor] = {}  # where it counts no steps itself

    def why_not(self) -> str | None:
        name = type(self.optimizer).__name__
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            return "differentiable=True: a graph that updates in place has no gradient"
        for p in self._groups:
            if p.dtype != torch.float32 and not is_sharded(p):
                return SIXTEEN_BITS.format(name, str(p.dtype).removeprefix("torch."))
        return why_hooked(self.optimizer)

    def begin(self, parameters: Sequence[Tensor]) -> None:
        self._groups = groups_of(self.optimizer)  # loading a state makes new ones
        self._updates.check()
        for p in parameters:
            state, update = self.optimizer.state[p], self._update(p)
            fresh = any(state.get(name) is None for name in update.states)
            if STEP in update.captured.states:
                state.setdefault(STEP, torch.tensor(0.0, dtype=torch.float32))
            elif fresh or p not in self._counted:
                self._counted[p] = torch.tensor(0.0 if fresh else 1.0, dtype=torch.float32)
            for name in (*update.states, *update.singles):
                if state.get(name) is None:
                    state[name] = _begun(p, update, name)

    def options(self) -> Hashable:
        return tuple(map(self._updates.version, self.optimizer.param_groups))

    def held(self, p: Tensor) -> list[Tensor]:
        state = self.optimizer.state[p].values()
        return [*(v for v in state if isinstance(v, Tensor)), self._numbers.row(p, self._update(p))]

    def plan(self, p: Tensor) -> UpdatePlan:
        update = self._update(p)
        return UpdatePlan(update, tuple((state, EXACT) for state in update.states), p.dtype)

    def tensors(self, p: Tensor) -> Tensors:
        plan, state = self.plan(p), self.optimizer.state[p]
        return {"numbers": self._numbers.row(p, self._update(p))} | {
            part: state[name] for name, _ in plan.codecs for part in plan.part_keys(name)
        }

    def step_alone(self) -> None:
        for p, count in self._counted.items():
            if not count:  # what has begun here is a momentum of an earlier step to it
                for name in self._update(p).states:
                    self.optimizer.state[p].pop(name, None)
        self._counted.clear()
        self.optimizer.step()

    def codes(self, p: Tensor, made: Codes, dtype: torch.dtype) -> Coded | str:
        return NO_CODES.format(type(self.optimizer).__name__)

    def leave(self, p: Tensor, coded: Coded) -> None:
        """Nothing is left: it writes no codes."""

    def updated(self, parameters: Sequence[Tensor]) -> None:
        torch._foreach_add_(self._counts(parameters), 1)
        self._numbers.leave()

    def steps(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        counts = self._counts(parameters)
        self._numbers.compute(
            [
                (p, self._groups[p][1], self._update(p), {**self.optimizer.state[p], STEP: count})
                for p, count in zip(parameters, counts, strict=True)
            ]
        )
        return [*torch._foreach_add(counts, 1)]

    def _counts(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        state = self.optimizer.state
        return [self._counted[p] if p in self._counted else state[p][STEP] for p in parameters]

    def _update(self, p: Tensor) -> CapturedUpdate:
        return self._updates.current(p, self._groups[p][1])


def _begun(p: Tensor, update: CapturedUpdate, name: str) -> Tensor:
    """A state as it begins, where the optimizer would keep it."""
    number = update.initial[name]
    if name in update.singles:
        return torch.tensor(number, dtype=torch.float32)
    return torch.full_like(p, number, memory_format=torch.preserve_format, requires_grad=False)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Learning rate schedulers warn where ``optimizer.step`` has not been called: the graph stands for it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
