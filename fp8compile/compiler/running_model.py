"""Where a graph stands in the model that runs: found when Dynamo hands the graph over, while that model is being called.

A block that is compiled by itself begins its paths at the block: ``output`` there is no head, and a head that is compiled by
itself has the path "". The modules being called are on Python's stack; the outermost that owns the graph's parameters is the
model. The names that it gives to these parameters say where the graph begins. Where they do not agree, nothing is claimed.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.fx.provenance import beginning, module_names, parameter_names, parameters_of
from fp8compile.recipe.context import Place

CALLS = tuple(f.__code__ for f in (nn.Module._call_impl, nn.Module._wrapped_call_impl))
CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)

_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_head(module: nn.Module) -> nn.Module:
    """Say that ``module`` is an output head, or holds one: its linears are never FP8. Returns ``module``.

    Heads that libraries name in their usual way are known without it (``Recipe.linears.skip``). Graphs that are compiled
    already stay as they are.

    Raises:
        ValueError: it is no module, or has no parameters.
    """
    if not isinstance(module, nn.Module) or next(module.parameters(), None) is None:
        raise ValueError(f"mark_head takes a module with parameters, such as model.lm_head, not {module!r:.80}")
    _heads.add(module)
    return module


def place_of(gm: GraphModule, example_inputs: Sequence[Any]) -> Place:
    """Where a Dynamo graph stands in the model that is being called now."""
    found = parameters_of(gm, example_inputs)
    marked = {id(p) for module in _heads for p in module.parameters()}
    heads = frozenset(at for at, _ in found if id(example_inputs[at]) in marked)
    return dataclasses.replace(place_from({id(example_inputs[at]): path for at, path in found}), heads=heads)


def place_from(paths: Mapping[int, str]) -> Place:
    """Where a graph stands in the model that is being called now, from its own paths of parameters, by their identity."""
    model = _outermost(paths)
    prefix = beginning(paths, parameter_names(model)) if model is not None else None
    return Place(prefix, "" if model is None or prefix is None else _core(model))


def innermost_type(parameters: Collection[int]) -> type | None:
    """The type of the innermost module being called that owns any of these parameters, by identity: whose code it is."""
    return next((type(unwrapped(module)) for module in _owners(parameters)), None)


def _outermost(parameters: Mapping[int, Any]) -> nn.Module | None:
    """The outermost module being called that owns any of these parameters, without the wrapper around it."""
    called = list(_owners(parameters))
    return unwrapped(called[-1]) if called else None


def _owners(parameters: Collection[int]) -> Iterator[nn.Module]:
    """The modules being called that own any of these parameters, by identity, the innermost first."""
    return (m for m in _being_called() if any(id(p) in parameters for p in m.parameters()))


def as_registered(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of each whole parameter that FSDP2 has gathered for a call, this rank's part, which modules and optimizers hold."""
    gathered = (pair for module in _being_called() for pair in private.unsharded_parameters(module))
    parts = {id(whole): sharded for sharded, whole in gathered}
    return [parts.get(id(p), p) for p in parameters]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module in the wrappers that torch puts around a whole model."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _being_called() -> Iterator[nn.Module]:
    """The modules whose call is on Python's stack, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        is_call = any(frame.f_code is code for code in CALLS)  # Dynamo's code may have no hash
        if is_call and isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module
        frame = frame.f_back  # type: ignore[assignment]


def _core(model: nn.Module) -> str:
    """The path of the model inside modules that hold nothing else: a LightningModule's ``model``, say."""
    names = module_names(model)
    core = model
    while (inner := _only_child(core)) is not None:
        core = inner
    return names[core]


def _only_child(module: nn.Module) -> nn.Module | None:
    children = [c for c in module.children() if next(c.parameters(), None) is not None]
    alone = len(children) == 1 and next(module.parameters(recurse=False), None) is None
    if not alone or isinstance(children[0], CONTAINERS) or next(children[0].children(), None) is None:
        return None
    return children[0]
