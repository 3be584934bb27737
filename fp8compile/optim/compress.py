"""Any element-wise optimizer with encoded states: its own step, captured, decodes and encodes them in one compiled kernel.

    optimizer = fp8compile.optim.compress(torch.optim.AdamW(model.parameters(), lr=3e-4), model=model)
    optimizer.step()                                  nothing else changes: schedulers, state dicts, copies

    optimizer.state[p] = {"step", "exp_avg.e4m3_expanded.codes", "exp_avg.e4m3_expanded.amax", ..., "exp_avg_sq. ..."}

What is captured is what the optimizer's ``step`` does, in torch.optim or in a class of your own (capture.py). How each state
is stored follows from what is proven of it there (proofs.py). Numbers such as the learning rate are read at every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8compile._arguments import check_one_of
from fp8compile._distributed import local_part
from fp8compile.optim import checking, checkpoint
from fp8compile.optim.base import EncodedOptimizer
from fp8compile.optim.formats import StateFormat, state_format_pair
from fp8compile.optim.interface import OWN_NAMES
from fp8compile.optim.low_bits import decoded_state
from fp8compile.optim.placement import DEFAULT_FORMAT, Names
from fp8compile.optim.plan import MASTERS

TAKEN = "{} has an attribute {!r}, which a compressed optimizer has for itself: rename it in the class"
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Group = Mapping[str, Any]


class Compressed(EncodedOptimizer):
    """What an optimizer becomes: its class with our step. ``plain`` is the class that it was."""

    refused_ways = ("fused",)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self.plain,), self.__getstate__()


def _again(plain: type[Optimizer]) -> Optimizer:
    """What a copy of a compressed optimizer begins as."""
    return object.__new__(compressed_class(plain))


CLASSES: dict[type[Optimizer], type[Compressed]] = {}


def compressed_class(plain: type[Optimizer]) -> type[Compressed]:
    """The class of a compressed optimizer: one of ``plain``, too."""
    if plain in CLASSES:
        return CLASSES[plain]
    step: Any = Optimizer.profile_hook_step(EncodedOptimizer.step)
    step.hooked = True  # torch would wrap it once more
    made: Any = type(plain.__name__, (Compressed, plain), {"plain": plain, "step": step})
    CLASSES[plain] = made
    return cast(type[Compressed], made)


def compress(
    optimizer: AnyOptimizer,
    state_format: StateFormat = DEFAULT_FORMAT,
    *,
    model: nn.Module | None = None,
    overrides: Mapping[str, StateFormat] | None = None,
    master: str = "none",
    seed: int = 0,
    compiled: bool = True,
) -> AnyOptimizer:
    """Encode the states of an optimizer, those it has and those it will have, and compile its step.

    Which ones is decided as in fp8compile.optim: small tensors, embeddings and what is overridden keep FP32. State dicts load
    torch.optim's, and ``decompress`` gives plain states back.

    Args:
        optimizer: of torch.optim, or any other whose step is element-wise. Is changed, and returned.
        state_format: of the states; a pair gives the signed states' and those' that are never negative. A parameter group
            that has an entry ``state_format`` of its own follows that.
        model: whose embeddings, overrides and names of parameters are to be known. Names also come from an optimizer
            made with ``model.named_parameters()``.
        overrides: formats by patterns (fnmatch) on parameter names.
        master, seed, compiled: see ``EncodedOptimizer``.

    Raises:
        ValueError: an optimizer, option, format or parameter that this does not work for; then nothing was changed.
    """
    if isinstance(optimizer, EncodedOptimizer) and not isinstance(optimizer, Compressed):
        raise ValueError(
            f"the states of fp8compile.optim.{type(optimizer).__name__} are encoded already: use it as it is"
        )
    if not isinstance(model, (nn.Module, NoneType)):
        raise ValueError(f"model={model!r}: the module whose parameters these are is needed, or None")
    checking.check_arguments(seed, compiled, overrides, False)
    check_one_of("master", master, MASTERS)
    state_format_pair(state_format)
    before = _Snapshot(optimizer)
    try:
        states = {p: dict(state) for p, state in optimizer.state.items()}
        _strip(optimizer)
        _become(optimizer, states, state_format, model, dict(overrides or {}), (master, seed, compiled))
    except BaseException:
        before.restore(optimizer)
        raise
    return optimizer


def decompress(optimizer: AnyOptimizer) -> AnyOptimizer:
    """The optimizer with plain FP32 states again; one that is not compressed is left as it is."""
    if not isinstance(optimizer, Compressed):
        return optimizer
    states = {
        p: _plain_state(optimizer, p, group)
        for group in optimizer.param_groups
        for p in group["params"]
        if optimizer.state.get(p)
    }
    optimizer.state.clear()
    optimizer.state.update(states)
    _strip(optimizer)
    return optimizer


def _strip(optimizer: Optimizer) -> None:
    """Take class, attributes and options of ours away; states stay as they are."""
    if not isinstance(optimizer, Compressed):
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        for name in checkpoint.OUR_GROUP_KEYS:
            options.pop(name, None)
    _as_class(optimizer, optimizer.plain)
    for name in OWN_NAMES:
        optimizer.__dict__.pop(name, None)


class _Snapshot:
    """An optimizer as it was, to go back to."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._class, self._attributes = type(optimizer), dict(optimizer.__dict__)
        self._defaults = dict(optimizer.defaults)
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._states = dict(optimizer.state)

    def restore(self, optimizer: Optimizer) -> None:
        optimizer.__class__ = self._class
        optimizer.__dict__.clear()
        optimizer.__dict__.update(self._attributes)
        optimizer.defaults = self._defaults
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(self._states)


def _become(
    optimizer: Optimizer,
    states: Mapping[Tensor, dict[str, Any]],
    state_format: StateFormat,
    model: nn.Module | None,
    patterns: dict[str, StateFormat],
    options: tuple[str, int, bool],
) -> None:
    master, seed, compiled = options
    for option in ("differentiable", "fused"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(f"{option}=True: its step cannot be captured. Make the optimizer with {option}=False")
    taken = [name for name in OWN_NAMES if name in vars(optimizer)]
    if taken:
        raise ValueError(TAKEN.format(type(optimizer).__name__, taken[0]))
    made: Any = _as_class(optimizer, compressed_class(type(optimizer)))
    made.seed, made.compiled, made.weight_codes, made.patterns = seed, compiled, False, patterns
    made._model_names = Names.of(model) if model is not None else Names()
    made._placements = {}
    ours = {"state_format": state_format, "master": master, checkpoint.VERSION_KEY: checkpoint.VERSION}
    made.defaults = ours | made.defaults
    for group in made.param_groups:
        for name, value in ours.items():
            group.setdefault(name, value)
    made.clear_caches()
    checking.check_overrides(patterns, [*made.names.names.values()])
    made.state.clear()
    for group in made.param_groups:
        checking.check_group(made, group)
    for index, group, p in made._parameters():
        kept = checkpoint._converted(made, p, group, states.get(p, {}), index)
        if kept:
            made.state[p] = kept


def _as_class(optimizer: Optimizer, kind: type[Optimizer]) -> Optimizer:
    """The optimizer as one of another class. What a scheduler has put around its step goes around the other's."""
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"the step of this {type(optimizer).__name__} was replaced by {step!r}: compress the optimizer before that"
        )
    optimizer.__class__ = kind
    if step is not None:
        optimizer.step = _wrapped_for_scheduler(weakref.ref(optimizer))  # type: ignore[method-assign]
    return optimizer


def _wrapped_for_scheduler(of: Callable[[], Any]) -> Callable[..., Any]:
    """As torch.optim.lr_scheduler wraps a step: it warns where none was called before its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = of()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _plain_state(optimizer: Compressed, p: Tensor, group: Group) -> dict[str, Any]:
    """The state of a parameter as the optimizer keeps it without us."""
    plan = optimizer.plan_of(p, group)
    plain: dict[str, Any] = decoded_state(p, plan, optimizer.state[p])
    for name in plan.update.states:
        plain[name] = plain[name].to(p.dtype)
    if group.get("capturable"):
        plain |= {name: plain[name].to(local_part(p).device) for name in ("step", *plan.update.singles)}
    plain |= {name: _as_python(plain[name]) for name in plan.update.in_python}
    return {name: plain[name] for name in plan.update.captured.returned}


def _as_python(number: Tensor) -> int | float:
    found = float(number)
    return int(found) if found.is_integer() else found
