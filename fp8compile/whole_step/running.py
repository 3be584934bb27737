"""A captured graph with its optimizer: what it is called with, and compiled code for each layout of states and gradients.

One captured graph has one compiled code, as long as options of the optimizer and layouts of its states stay. Learning rates
and other numbers are values of an input. A call with gradients from earlier calls (``accumulate``) has code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.compiler.hooks import Halves
from fp8compile.compiler.watchers import show_made
from fp8compile.recipe.recipe import Recipe
from fp8compile.whole_step.codes import Coded
from fp8compile.whole_step.compiling import Compiled, compile_whole
from fp8compile.whole_step.joined import CannotJoin, joined
from fp8compile.whole_step.own_inputs import Given, OwnInputs
from fp8compile.whole_step.placing import ACCUMULATED, STEP, Placed, UpdateTask, with_updates
from fp8compile.whole_step.rows import states_in_rows
from fp8compile.whole_step.updates import Updates, parameters_of

SHARED = "two parameters that it updates share memory"
SHARED_WITH = "a parameter that it updates shares memory with another input of the graph"
WITH_GRADIENT = "a tensor that is no parameter has a gradient, which a graph with its update does not return"
SYMBOLIC = (
    "gradients from earlier calls came or went while the graph has sizes that change: compile with dynamic=False"
)
ALIGNED = 16
DEVICES = "its parameters are on several devices"


class NotThisTime(Exception):
    """This call has to be forward, backward and step by themselves; the next one need not. Nothing was run yet."""


@dataclass
class Counts:
    """What whole steps have compiled and done so far.

    Attributes:
        compilations: how often a whole step was compiled.
        updated: how many parameters the last one updates.
        gradient_bytes, gradient_peak: of the last one (``Placed``).
        norm: that of all gradients in the last call, 0-d, where they are clipped.
        coded, codes: how many weights' codes its updates write, and of how many weights it takes codes.
        not_coded: why the updates write no codes of a weight, the first reason.
    """

    compilations: int = 0
    updated: int = 0
    gradient_bytes: int = 0
    gradient_peak: int = 0
    norm: Tensor | None = None
    coded: int = 0
    codes: int = 0
    not_coded: str | None = None


@dataclass(frozen=True)
class StepOptions:
    """What is the same for all graphs of a whole step."""

    recipe: Recipe
    mode: str | None
    clip_norm: float | None


class WholeGraph:
    """Runs one captured graph as a whole step; takes the inputs of Dynamo's graph, and returns its results.

    Raises:
        CannotJoin: see ``joined``; or parameters that cannot be updated in one graph.
    """

    def __init__(
        self,
        halves: Halves,
        inputs: Sequence[Any],
        own: OwnInputs,
        updates: Updates,
        options: StepOptions,
        counts: Counts,
    ) -> None:
        self._halves, self._own, self._updates = halves, own, updates
        self._options, self._counts = options, counts
        whole, given = joined(halves), own.given(inputs)
        if max(whole.inputs, default=-1) >= len(inputs) + len(given.inputs):
            raise CannotJoin("the recipe gives the graph inputs that a whole step does not know")
        mine = {*map(id, parameters_of(updates.optimizer))}
        self._at = [at for at in sorted(whole.gradients) if at < len(inputs) and id(inputs[at]) in mine]
        self._updated, self._loss = frozenset(self._at), whole.loss
        parameters = [inputs[at] for at in self._at]
        if not parameters:
            raise CannotJoin("the loss depends on no parameter of the optimizer")
        updated = {*map(id, parameters)}
        self._others = [p for p in parameters_of(updates.optimizer) if id(p) not in updated]
        _check_memory(parameters, [x for at, x in enumerate(inputs) if at not in self._updated])
        if any(not isinstance(inputs[at], nn.Parameter) for at in whole.gradients if at < len(inputs)):
            raise CannotJoin(WITH_GRADIENT)
        if len({p.device for p in parameters}) > 1:
            raise CannotJoin(DEVICES)
        self._symbolic = any(isinstance(value, int) for value in inputs)
        self._variants: dict[Hashable, tuple[Placed, Compiled]] = {}
        self._known: Hashable = None
        self._held: list[Tensor] = []
        self._ready: tuple[Placed, Compiled, list[UpdateTask]] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if any(p.grad is not None for p in self._others):
            raise NotThisTime
        measured = self._own.measures(inputs)
        if measured is not None:
            return self._by_themselves(measured)
        parameters = [inputs[at] for at in self._at]
        with torch.no_grad():
            self._updates.begin(parameters)
            given = self._own.given(inputs)
            inputs, coded = (*inputs, *given.inputs.values()), self._coded(inputs, given)
            placed, compiled, tasks = self._prepared(parameters, given, coded)
            steps = apart(self._updates.steps(parameters), parameters[0].device)
            tasks = [
                replace(task, step=step, accumulated=p.grad)
                for task, step, p in zip(tasks, steps, parameters, strict=True)
            ]
            values = [inputs[at] for at in placed.positions]
            values += [_given(tasks[row], name) for row, name in placed.extra]
            try:
                with torch.autocast(parameters[0].device.type, enabled=False):
                    results = compiled(values)
            finally:  # half a step writes too
                self._written([inputs[placed.positions[i]] for i in placed.writes], tasks)
        self._updates.updated(parameters)
        for p in parameters:
            p.grad = None
            if p in coded:
                self._updates.leave(p, coded[p])
        if self._options.clip_norm is not None:
            *results, self._counts.norm = results
        if given.histories is not None and self._own.returns_statistics:
            *results, statistics = results
            given.histories.add(statistics)
        return results

    def _by_themselves(self, results: Sequence[Any]) -> list[Any]:
        """Backward and update of a forward that has measured; returns its results, without gradients."""
        results[self._loss].backward()
        step_by_itself(self._updates.optimizer, self._updates.step_alone, self._options, self._counts)
        return [each.detach() if isinstance(each, Tensor) else each for each in results]

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Compile for the states as they are, which begin here; nothing is run."""
        parameters = [inputs[at] for at in self._at]
        with torch.no_grad():
            self._updates.begin(parameters)
            given = self._own.given(inputs)
            self._prepared(parameters, given, self._coded(inputs, given))

    def _coded(self, inputs: Sequence[Any], given: Given) -> dict[Tensor, Coded]:
        """By weight, what its update takes to write its codes."""
        coding = ((at, made) for at, made in given.codes.items() if at in self._updated)
        codes = {at: self._updates.codes(inputs[at], made, self._own.dtypes[at]) for at, made in coding}
        self._counts.codes = len(codes)
        self._counts.not_coded = next((reason for reason in codes.values() if isinstance(reason, str)), None)
        coded = {inputs[at]: each for at, each in codes.items() if isinstance(each, Coded)}
        self._counts.coded = len(coded)
        return coded

    def _prepared(
        self, parameters: Sequence[Tensor], given: Given, coded: Mapping[Tensor, Coded]
    ) -> tuple[Placed, Compiled, list[UpdateTask]]:
        """Compiled code and its tasks; those of the last call, where the tensors and options are the same objects."""
        held = [t for p in parameters for t in self._updates.held(p)]
        held += [t for each in coded.values() for t in each.tensors.values()]
        grads = tuple(None if p.grad is None else (p.grad.dtype, p.grad.stride()) for p in parameters)
        known = self._updates.options(), tuple(each.wanted for each in coded.values()), tuple(map(id, held)), grads
        if self._ready is None or known != self._known:
            self._ready = self._chosen(self._tasks(parameters, coded), parameters, given)
            self._known, self._held = known, held
        return self._ready

    def _tasks(self, parameters: Sequence[Tensor], coded: Mapping[Tensor, Coded]) -> list[UpdateTask]:
        of, device = self._updates, parameters[0].device
        steps = apart([torch.ones((), dtype=torch.float32)] * len(parameters), device)
        tasks = [
            UpdateTask(at, of.plan(p), of.tensors(p), step, p.grad)
            for at, step, p in zip(self._at, steps, parameters, strict=True)
        ]
        return [_complete(task, p, coded.get(p)) for task, p in zip(tasks, parameters, strict=True)]

    def _chosen(
        self, tasks: list[UpdateTask], parameters: Sequence[Tensor], given: Given
    ) -> tuple[Placed, Compiled, list[UpdateTask]]:
        key = tuple((task.plan, _layouts(task)) for task in tasks)
        if key not in self._variants:
            if self._variants and self._symbolic:
                raise CannotJoin(SYMBOLIC)
            self._variants[key] = self._compiled(tasks, parameters, given)
        tasks = [replace(task, accumulated=None) for task in tasks]
        return *self._variants[key], tasks

    def _compiled(
        self, tasks: list[UpdateTask], parameters: Sequence[Tensor], given: Given
    ) -> tuple[Placed, Compiled]:
        kind = parameters[0].device.type
        with torch.autocast(kind, enabled=False):
            clip_norm, own = self._options.clip_norm, self._own
            placed = with_updates(
                joined(self._halves), tasks, clip_norm, given.inputs, returns_statistics=own.returns_statistics
            )
            show_made("place_updates", (self._halves.fw, self._halves.bw), placed.module)
            compiled = compile_whole(placed.module, self._options.recipe, self._options.mode)
        self._counts.compilations += 1
        self._counts.updated = len(tasks)
        self._counts.gradient_bytes, self._counts.gradient_peak = placed.gradient_bytes, placed.gradient_peak
        return placed, compiled

    def _written(self, inputs: Sequence[Tensor], tasks: Sequence[UpdateTask]) -> None:
        """Tell autograd and caches of codes that these have new values: generated code writes past their versions."""
        states = [t for task in tasks for name, t in task.tensors.items() if name not in ("numbers", "stream")]
        torch.autograd.graph.increment_version([*inputs, *states])


def step_by_itself(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], options: StepOptions, counts: Counts
) -> None:
    """What follows a backward that is no part of a graph: clipping, the step, and gradients set to none."""
    if options.clip_norm is not None:
        counts.norm = torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), options.clip_norm)
    step()
    optimizer.zero_grad()


def _check_memory(parameters: Sequence[Tensor], others: Sequence[Any]) -> None:
    """Raises CannotJoin where an update would change what else the graph reads."""
    storages = [p.untyped_storage().data_ptr() for p in parameters if p.numel()]
    if len({*storages}) < len(storages):
        raise CannotJoin(SHARED)
    read = {x.untyped_storage().data_ptr() for x in others if isinstance(x, Tensor) and x.numel()}
    if read & {*storages}:
        raise CannotJoin(SHARED_WITH)


def _complete(task: UpdateTask, p: Tensor, coded: Coded | None) -> UpdateTask:
    """The task with the codes that it writes, and with its states as rows."""
    plan, tensors = task.plan, dict(task.tensors)
    if coded is not None:
        plan, tensors = replace(plan, codes=coded.wanted), {**tensors, **coded.tensors}
    return replace(task, plan=plan, tensors=states_in_rows(plan, p, tensors))


def _given(task: UpdateTask, name: str) -> Any:
    if name == STEP:
        return task.step
    return task.accumulated if name == ACCUMULATED else task.tensors[name]


def apart(steps: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Numbers, each 0-d, on the device: moved as one tensor, and ``ALIGNED`` bytes apart, since generated code copies inputs
    that begin elsewhere."""
    together = torch.zeros(len(steps), ALIGNED // 4, dtype=torch.float32, device=device)
    together[:, 0].copy_(torch.stack([*steps]), non_blocking=True)
    return [*together[:, 0].unbind()]


def _layouts(task: UpdateTask) -> Hashable:
    every = {**task.tensors, ACCUMULATED: task.accumulated}
    return tuple((name, t.shape, t.stride(), t.dtype, t.device) for name, t in every.items() if t is not None)
