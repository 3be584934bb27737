"""What an optimizer's states begin as: seen in a first step of its own, on small parameters.

A state that is made before the gradient is looked at begins as a constant. One that is made of the gradient (SGD's momentum)
has no beginning: its first step is another graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.optim.capture import RANDOM, numbers_in, run_as, with_number
from fp8compile.optim.standing_in import NotCaptured, own_attributes, plain_class, plain_step, standing_in, unchanged

TAKES_CLOSURE = "it computes the loss itself, by a closure"
SMALL = (3, 2)  # elements along a dimension, in two trials
NOT_TWICE = "its step is not the same twice"
LOOKS_AROUND = "its step of a parameter depends on others"
Shape = tuple[int, ...]
INTEGERS = "its state {!r} has integers for elements"


class _Recorded(dict[str, Any]):
    """A parameter's state that remembers what was put in first."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        super().__init__({name: _copy(value) for name, value in begin.items()})
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, _copy(value))
        super().__setitem__(name, value)

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]

    def update(self, *args: Any, **several: Any) -> None:
        for name, value in dict(*args, **several).items():
            self[name] = value

    def __ior__(self, other: Any) -> _Recorded:  # type: ignore[override, misc]
        self.update(other)
        return self


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Initial:
    """One state.

    Attributes:
        like: a tensor on the meta device.
        value: of each element; None where it is made of the gradient.
        in_python: whether it is a Python number.
    """

    like: Tensor
    value: float | None
    in_python: bool = False


def initial_states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: Sequence[int]
) -> dict[str, Initial]:
    """The states of a parameter of ``shape``, by name.

    Raises:
        NotCaptured: its first step fails, or a state is not a tensor.
    """
    small, smaller = (tuple(max(1, min(size, most)) for size in shape) for most in SMALL)
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        constructed = _constructed(optimizer, group, small)
        p, state = _first_step(optimizer, group, small, 1.0, constructed)
        if not torch.equal(before, torch.get_rng_state()):
            raise NotCaptured(RANDOM)
    _check_alone(optimizer, group, small, p, constructed)
    if constructed:  # numbers are read once for all
        other = _Recorded({})
        other.first = _made_by_constructor(plain_class(optimizer), group, smaller)
    else:
        _, other = _first_step(optimizer, _halved(group), smaller, 3.0, {})
    begin = constructed | state.first
    again, same = _first_step(optimizer, group, small, 1.0, begin)
    begun = _equal(p, again) and state.keys() == same.keys() and all(map(_equal, state.values(), same.values()))
    found = {name: _initial(name, shape, small, value, other.first[name]) for name, value in begin.items()}
    return found if begun else {name: dataclasses.replace(each, value=None) for name, each in found.items()}


def _halved(group: Mapping[str, Any]) -> dict[str, Any]:
    """With other numbers: a state that begins as one of them begins as no constant."""
    found = dict(group)
    for path, number in numbers_in(group).items():
        found[path[0]] = with_number(found[path[0]], path[1:], number * 0.5)
    return found


def _constructed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The states that a parameter has before any step, where it cannot do without: those that a constructor makes, as
    Adagrad's up to torch 2.12."""
    try:
        _first_step(optimizer, group, shape, 1.0, {})
        return {}
    except NotCaptured:
        made = _made_by_constructor(plain_class(optimizer), group, shape)
        if not made:
            raise
        return made


def _made_by_constructor(kind: type[torch.optim.Optimizer], group: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in run_as(group, capturable=False).items() if name in known}
    options.pop("params", None)
    p = torch.zeros(shape)
    with contextlib.suppress(Exception):  # a constructor of other arguments
        return dict(kind([p], **options).state.get(p, {}))
    return {}


def _check_alone(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: Shape, p: Tensor, begin: Mapping[str, Any]
) -> None:
    """Raises NotCaptured where a step is not the same again, or beside another parameter."""
    if not _equal(p, _first_step(optimizer, group, shape, 1.0, begin)[0]):
        raise NotCaptured(NOT_TWICE)
    if not _equal(p, _first_step(optimizer, group, shape, 1.0, begin, beside=True)[0]):
        raise NotCaptured(LOOKS_AROUND)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(one == other)


def _first_step(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: Shape,
    scale: float,
    begin: Mapping[str, Any],
    beside: bool = False,
) -> tuple[Tensor, _Recorded]:
    """A parameter and its state behind one step, from the states that it begins with; ``beside`` another parameter."""
    p = torch.linspace(-1, 2, torch.Size(shape).numel()).mul(scale).reshape(shape)
    p.grad = p.flip(0) + scale
    state = _Recorded(begin)
    alone = standing_in(optimizer, run_as(group, capturable=False), p, state, own_attributes(optimizer))
    if beside:
        other = p.flip(0) * 7 + 5
        other.grad = p * 11 - 3
        alone.param_groups[0]["params"] = [other, p]
        alone.state[other] = {name: _copy(value) for name, value in begin.items()}
    step = plain_step(optimizer)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise NotCaptured(TAKES_CLOSURE)
    try:
        with unchanged(alone), torch.no_grad():
            step(alone)
    except NotCaptured:
        raise
    except Exception as error:
        raise NotCaptured(f"a first step of it fails: {type(error).__name__}: {error}".splitlines()[0]) from error
    if alone.state[p] is not state:
        raise NotCaptured("it replaces a parameter's state")
    return p, state


def _initial(name: str, shape: Sequence[int], small: tuple[int, ...], one: Any, other: Any) -> Initial:
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        return Initial(torch.empty((), device="meta"), float(one) if one == other else None, in_python=True)
    if not isinstance(one, Tensor):
        raise NotCaptured(f"its state {name!r} is a {type(one).__name__}, neither a tensor nor a number")
    if one.dim() and tuple(one.shape) != small:
        raise NotCaptured(f"its state {name!r} has neither the parameter's shape nor one number")
    full = torch.empty(tuple(shape) if one.dim() else (), device="meta", dtype=one.dtype)
    if one.dim() and not one.is_floating_point():
        raise NotCaptured(INTEGERS.format(name))
    flat = torch.cat([one.flatten(), other.flatten()])
    alike = bool((flat == flat[0]).all()) and bool(flat[0].isfinite())
    return Initial(full, float(flat[0]) if alike else None)
