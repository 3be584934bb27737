"""A warning for a model that was to be compiled but runs in plain eager: at an optimizer step, or when the program ends.

    asked     torch.compile looked the backend up: ``watch``, once a process
    called    Dynamo was given code since then
    compiled  the backend was given a graph

At the end of the program the warning comes if a compiled model was called and no graph came. Dynamo does not tell for which
backend it was given code. So there is no warning if another backend got a graph meanwhile; nor after an uncaught exception,
which has its own message.

At the first step of each optimizer the warning is about one model: compiled, trained by this optimizer, with no graph that
reads its parameters, whatever else was compiled. Each optimizer is looked at once, and then the hook returns at once. (It is
never removed: torch goes through its hooks while they run, so that a hook that removes itself breaks the step of whoever has
registered another one.)
"""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8compile import _torch as private
from fp8compile.compiler import report_store

NAME = "fp8compile"
IN_PLACE = (
    "{kind}.compile(backend='fp8compile') has compiled no graph, and this model trains in plain eager. {cause}. "
    "Use model = torch.compile(model, backend='fp8compile')"
)
WRAPPED = (
    "torch.compile({kind}, backend='fp8compile') has compiled no graph, and this model trains in plain eager. {cause}"
)
OF_TORCH = "Dynamo skips the forward of a module that torch.nn defines, where that is compiled in place"
SKIPPED = "Dynamo skipped every frame or fell back to eager; TORCH_LOGS=graph_breaks shows where"


class _CompilationWatch:
    """The state when the backend was asked for, and the optimizers looked at since."""

    def __init__(self) -> None:
        self.codes, self.graphs = private.frames_seen(), private.graphs_captured()
        self.looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.said = False
        register_optimizer_step_post_hook(_after_step)


_watch: _CompilationWatch | None = None


def watch() -> None:
    """From now on, warn of models compiled without effect; called when torch.compile first asks for the backend."""
    global _watch
    if _watch is None:
        _watch = _CompilationWatch()
        atexit.register(say_at_exit)


def say_at_exit() -> None:
    """Warn if a compiled model was called and no graph came, and nothing else explains that."""
    crashed = getattr(sys, "last_value", None) is not None
    if _watch is None or _watch.said or crashed or report_store.any_graph_arrived() or private.dynamo_config.disable:
        return
    called = private.frames_seen() - _watch.codes
    if called and private.graphs_captured() == _watch.graphs:
        report_store.warn_once(report_store.NO_GRAPH_COMPILED)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook; it does nothing in a step that is compiled itself."""
    if torch.compiler.is_compiling():
        return
    if _watch is not None and optimizer not in _watch.looked_at:
        _look(_watch, optimizer)


def _look(known: _CompilationWatch, optimizer: Optimizer) -> None:
    """Find a model that this optimizer trains and that was compiled without effect; warn once."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    trained = {id(p) for p in parameters if p.grad is not None or optimizer.state.get(p)}
    if not trained:
        return
    compiled = report_store.compiled_parameters()
    model = _compiled_in_vain(trained - compiled) if private.frames_seen() else None
    known.looked_at.add(optimizer)
    if model is not None:
        known.said = True
        if isinstance(model, private.OptimizedModule):
            report_store.warn_once(WRAPPED.format(kind=type(model._orig_mod).__name__, cause=SKIPPED))
            return
        skipped_by_name = not private.COMPILES_CONTAINERS and type(model).forward.__module__.startswith("torch.nn.")
        cause = OF_TORCH if skipped_by_name else SKIPPED
        report_store.warn_once(IN_PLACE.format(kind=type(model).__name__, cause=cause))


def _compiled_in_vain(parameters: Set[int]) -> nn.Module | None:
    """A module compiled by this backend, in place or not, that holds one of ``parameters`` and has no graph.

    A sharded parameter is another tensor in the graph than in the module, so modules with such parameters are left out.
    """
    if not parameters or private.dynamo_config.disable:
        return None
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module):
            continue
        wrapped = issubclass(type(each), private.OptimizedModule)
        if not wrapped and not vars(each).get("_compiled_call_impl"):
            continue
        if private.backend_name(each) != NAME or report_store.compiled_for(each._orig_mod if wrapped else each):
            continue
        own = list(each.parameters())
        if all(type(p) is nn.Parameter for p in own) and not parameters.isdisjoint(map(id, own)):
            return each  # type: ignore[no-any-return]
    return None
