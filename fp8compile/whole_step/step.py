"""``fp8compile.train_step``: forward, backward and the optimizer's update as one compiled graph.

    step = fp8compile.train_step(model, loss_fn, optimizer)
    for batch in batches:
        loss = step(batch)                     loss_fn(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        schedule.step()

Dynamo captures ``loss_fn(model, ...)``. Our backend has AOTAutograd trace and cut it as ever, with all passes; joins the
halves (``joined``), puts the updates in (``placing``) and compiles the whole (``compiling``), behind Dynamo's guards.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile._arguments import FLAGS, check_number, check_one_of
from fp8compile.compiler import report_store
from fp8compile.compiler.dump import watch_for
from fp8compile.compiler.hooks import taking_halves
from fp8compile.compiler.inductor import compile_once
from fp8compile.compiler.inductor_options import mode_options
from fp8compile.compiler.node_by_node import run_nothing
from fp8compile.compiler.watchers import watch_passes
from fp8compile.recipe.from_file import recipe_of
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.report import Report
from fp8compile.whole_step.declines import why_not
from fp8compile.whole_step.joined import CannotJoin
from fp8compile.whole_step.own_inputs import OwnInputs
from fp8compile.whole_step.running import Counts, NotThisTime, StepOptions, WholeGraph, step_by_itself
from fp8compile.whole_step.summary import WholeStep
from fp8compile.whole_step.updates import (
    Updates,
    mark_stepped,
    parameters_of,
    traits_of,
    unless_it_fails,
    updates_of,
)

log = logging.getLogger("fp8compile")
LossFn = Callable[..., Any]
NO_BACKWARD = "no gradient was recorded: the loss depends on no parameter that trains"
COMPILED = "train_step: {} is compiled already; give train_step the model before that"
WITHOUT_GRADIENTS = (
    "train_step{} is called under torch.no_grad() or inference_mode: call it outside, or evaluate by the model"
)
NO_LOSS = "train_step: loss_fn returned {}: a loss is needed, one number that has a gradient, or a tuple that begins with it"


def train_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fallback: bool = True,
) -> TrainStep:
    """A callable that trains on one batch: forward, backward and update as one graph. Compiles at its first call.

    Args:
        model: any module, unmodified and not compiled.
        loss_fn: ``loss_fn(model, *args, **kwargs)`` returns the loss, or a tuple that begins with it; what else is in the
            tuple is returned without gradients.
        optimizer: one of fp8compile.optim, or torch.optim's Adam, AdamW or SGD. Its states stay where they are.
        recipe: a Recipe, the name of a preset or a dict of fields; by default what FP8COMPILE_RECIPE names, or the default.
        clip_norm: clips gradients to this norm, as torch.nn.utils.clip_grad_norm_. All of them are alive then.
        mode, dynamic: as in torch.compile.
        fallback: where one graph is not possible, run forward, backward and step by themselves, and log why. False: raise.

    Raises:
        ValueError: an argument that makes no sense; with ``fallback=False`` also why one graph is not possible.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"train_step: model is a {type(model).__name__}: a module is needed")
    if not callable(loss_fn):
        raise ValueError(f"train_step: loss_fn={loss_fn!r}: a function of the model and a batch is needed")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"train_step: optimizer is a {type(optimizer).__name__}: a torch.optim.Optimizer is needed")
    if isinstance(model, private.OptimizedModule) or any(m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError(COMPILED.format(type(model).__name__))
    if clip_norm is not None:
        check_number("clip_norm", clip_norm)
    check_one_of("dynamic", dynamic, (*FLAGS, None))
    check_one_of("fallback", fallback, FLAGS)
    mode_options(mode)
    chosen = recipe_of(None) if recipe is None else Recipe.resolve(recipe, Recipe())
    return TrainStep(model, loss_fn, optimizer, StepOptions(chosen, mode, clip_norm), dynamic, fallback)


class TrainStep:
    """What ``train_step`` returns. Call it with a batch; it returns what ``loss_fn`` returns, without gradients.

    Attributes:
        model, optimizer: as given.
        grad_norm: with ``clip_norm``, the norm of all gradients of the last call before they were clipped, 0-d; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        dynamic: bool | None,
        fallback: bool,
    ) -> None:
        self.model, self.optimizer, self._options, self._fallback = model, optimizer, options, fallback
        self._counts = Counts()
        self._reports: list[GraphReport] = []
        self._reason: str | None = None
        self._updates: Updates | None = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            return _without_gradients(loss_fn(model, *args, **kwargs))

        self._forward, self._dynamic = forward, dynamic
        wanted: dict[str, Any] = {"recipe": options.recipe}
        self._loss: LossFn = torch.compile(forward, backend="fp8compile", options=wanted, dynamic=dynamic)
        self._begin()

    @property
    def grad_norm(self) -> Tensor | None:
        return self._counts.norm

    @property
    def summary(self) -> WholeStep:
        """What was done so far."""
        counts = self._counts
        reached = counts.updated, len(parameters_of(self.optimizer))
        kept = counts.gradient_bytes, counts.gradient_peak
        summary = WholeStep(self._reason, counts.compilations, *reached, *kept, self._options.clip_norm)
        return dataclasses.replace(summary, codes=counts.codes, coded=counts.coded, not_coded=counts.not_coded)

    def report(self) -> Report:
        """The report of the graphs that it has compiled; its remarks begin with what ``summary`` says.

        Raises:
            ValueError: nothing was compiled yet: call it with a batch first.
        """
        if not self._reports and self._reason is None:
            raise ValueError("train_step: nothing was compiled yet: call it with a batch first")
        first, *others = self._reports or [GraphReport("training")]
        first = dataclasses.replace(first, remarks=(*str(self.summary).splitlines(), *first.remarks))
        return Report((first, *others), str(self._options.recipe))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch. Gradients that earlier calls of ``accumulate`` have left in ``.grad`` count too.

        What ``loss_fn`` raises is no step: parameters, states and counts are then as they were.

        Raises:
            ValueError: it is called under ``torch.no_grad()`` or ``torch.inference_mode()``.
        """
        _check_gradients("")
        with unless_it_fails(self.optimizer):
            return self._step(args, kwargs)

    def _step(self, args: Any, kwargs: Any) -> Any:
        if self._reason is None and self._captured_for != traits_of(self.optimizer):
            self._begin()
        if self._reason is not None:
            return self._three_calls(args, kwargs)
        try:
            results = self._whole(*args, **kwargs)
        except NotThisTime:
            return self._three_calls(args, kwargs)
        except (*private.NO_SINGLE_GRAPH, private.BackendCompilerFailed, CannotJoin) as error:
            reason = _reason_of(error)
            results = (
                self._three_calls(args, kwargs) if self._fallback else None
            )  # what the model raises, it raises here
            self._decline(reason)
            return results
        mark_stepped(self.optimizer)
        return results

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch's gradients to ``.grad``, without an update; the next call of the step takes them.

        The loss is not divided: let ``loss_fn`` do it.
        """
        _check_gradients(".accumulate")
        results = self._loss(*args, **kwargs)
        loss = results[0] if isinstance(results, tuple) else results
        loss.backward()
        return (loss.detach(), *results[1:]) if isinstance(results, tuple) else loss.detach()

    def _begin(self) -> None:
        """Capture anew, for the parameters and hooks that there are now."""
        self._captured_for, self._parameters = traits_of(self.optimizer), parameters_of(self.optimizer)
        # Dynamo keeps what it compiles by code object, and counts it so.
        self._forward.__code__ = self._forward.__code__.replace()
        backend = functools.partial(self._backend)  # equal to none before, whose graphs Dynamo would find
        self._whole: LossFn = torch.compile(self._forward, backend=backend, fullgraph=True, dynamic=self._dynamic)
        try:
            self._updates = updates_of(self.optimizer)
        except ValueError as error:
            self._decline(str(error))
            return
        if reason := why_not(self.model, self._updates, self._options.recipe, self._options.mode):
            self._decline(reason)

    def _decline(self, reason: str) -> None:
        if not self._fallback:
            raise ValueError(f"train_step: one graph is not possible: {reason}")
        self._reason = reason
        log.warning("train_step runs forward, backward and optimizer.step() by themselves: %s", reason)

    def _three_calls(self, args: Any, kwargs: Any) -> Any:
        results = self.accumulate(*args, **kwargs)
        step = self._updates.step_alone if self._updates else self.optimizer.step  # states may have begun here
        step_by_itself(self.optimizer, step, self._options, self._counts)
        return results

    def _backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: a graph of the loss becomes a whole step."""
        assert self._updates is not None
        report_store.graph_arrives()
        watch = watch_for(self._options.recipe)
        with watch_passes(watch):
            with taking_halves() as taken:
                halves, reports, _ = compile_once(gm, inputs, self._options.recipe, self._options.mode, run_nothing)
            own = OwnInputs(halves)
            if len(taken) != own.graphs:
                raise CannotJoin(NO_BACKWARD)
            whole = WholeGraph(taken[0], inputs, own, self._updates, self._options, self._counts)
            whole.prepare(inputs)
        if watch:
            watch.report(reports, self._options.recipe)
        self._reports += reports
        return whole


def _check_gradients(call: str) -> None:
    if not torch.is_grad_enabled():
        raise ValueError(WITHOUT_GRADIENTS.format(call))


def _without_gradients(found: Any) -> Any:
    """What ``loss_fn`` returned, in which the loss alone has a gradient."""
    loss = found[0] if isinstance(found, tuple) and found else found
    if not isinstance(loss, Tensor):
        raise ValueError(NO_LOSS.format(type(found).__name__))
    if not isinstance(found, tuple):
        return found
    return (loss, *private.tree_map_only(Tensor, Tensor.detach, found[1:]))


def _reason_of(error: Exception) -> str:
    """Raises the error again where it is no decline."""
    inner = getattr(error, "inner_exception", error)
    if isinstance(inner, CannotJoin):
        return str(inner)
    if isinstance(error, private.NO_SINGLE_GRAPH):
        first, *_ = str(error).strip().splitlines()
        return f"Dynamo captures no single graph: {first}"
    raise error
