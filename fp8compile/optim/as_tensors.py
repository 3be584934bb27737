"""A captured step as operations on tensors alone, in two parts: what is one number, and what is one element.

    scalars(numbers ..., step, one-number states ...)  ->  what elements need of them; new one-number states      FP64
    elements(p, g, states ..., scalars ...)            ->  p', states' ...                                        FP32

So a step's numbers, such as ``lr / (1 - beta1 ** step)``, are computed once for all parameters of a group, in double as
Python does, and not by every thread. An operation that takes plain numbers only holds the group's number fixed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import behind

aten = torch.ops.aten
Function = Callable[..., Any]
KINDS = (torch.float32, torch.bool)  # of elements that numbers of the step are combined with


class TakesNumbers(Exception):
    """An operation takes a number that no tensor can stand for. Attributes: ``places``, of the numbers, by order."""

    def __init__(self, places: set[int]) -> None:
        super().__init__(places)
        self.places = places


def is_one(x: Any) -> bool:
    """Whether it is a number of the step: FP64 without dimensions, or whether something holds of such."""
    return isinstance(x, Tensor) and x.dim() == 0 and x.dtype in (torch.float64, torch.bool)


def for_elements(x: Any) -> Any:
    """A number of the step as elements take it."""
    return x.float() if is_one(x) and x.dtype == torch.float64 else x


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return torch.lerp(start, end, for_elements(weight))


def _addcmul(start: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return torch.addcmul(start, a * b, for_elements(value)) if is_one(value) else start + value * (a * b)


def _addcdiv(start: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    made: Tensor = _add(start, _div(a, b), alpha=value)
    return made


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if is_one(alpha):
        return (
            torch.addcmul(for_elements(x), for_elements(alpha), for_elements(y)) if _elements(x, y) else x + alpha * y
        )
    return _both(operator.add, x, y if alpha == 1 else alpha * y)


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return _both(operator.sub, x, y) if not is_one(alpha) and alpha == 1 else _add(x, y, alpha=-alpha)


def _div(x: Any, y: Any) -> Any:
    """By a number of the step: times its inverse, as PyTorch has it on a GPU."""
    return _both(operator.mul, x, 1 / y) if is_one(y) and _elements(x) else _both(operator.truediv, x, y)


def _elements(*several: Any) -> bool:
    return any(isinstance(x, Tensor) and not is_one(x) for x in several)


def _both(fn: Function, *several: Any) -> Any:
    return fn(*(map(for_elements, several) if _elements(*several) else several))


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    for limit, fn, name in ((low, torch.maximum, "min"), (high, torch.minimum, "max")):
        if isinstance(limit, Tensor):
            x = _both(fn, x, limit)
        elif limit is not None:
            x = torch.clamp(x, **{name: limit})
    return x


def _where(holds: Any, x: Any, y: Any) -> Any:
    found = _both(torch.where, holds, x, y)
    return found.float() if _elements(holds, x, y) and found.dtype == torch.float64 else found


def _masked(x: Tensor, indices: list[Any], value: Any, accumulate: bool = False) -> Tensor:
    """``x[mask] = value``, of a mask of its shape and one value."""
    [mask] = indices
    assert mask.dtype == torch.bool and mask.shape == x.shape and not accumulate
    return _where(mask, value, x)  # type: ignore[no-any-return]


def _filled(like: Tensor, value: Any, **_: Any) -> Any:
    if is_one(value) and not _elements(like):
        return value
    return torch.zeros_like(like) + for_elements(value)


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _pair(fn: Function) -> Function:
    return lambda x, y: _both(fn, x, y)


def _one(fn: Function) -> Function:
    return lambda x: fn(x) if isinstance(x, Tensor) else fn(torch.tensor(x, dtype=torch.float64))


COMPARED = {
    "gt": operator.gt,
    "lt": operator.lt,
    "ge": operator.ge,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
# By packet: the same on tensors in the places of numbers.
FORMS: dict[Any, Function] = {
    aten.add: _add,
    aten.sub: _sub,
    aten.rsub: lambda x, y, alpha=1: _sub(y, x, alpha=alpha),
    aten.mul: _pair(operator.mul),
    aten.div: _div,
    aten.pow: _pair(torch.pow),
    aten.lerp: _lerp,
    aten.addcmul: _addcmul,
    aten.addcdiv: _addcdiv,
    aten.clamp: _clamp,
    aten.clamp_min: _clamp,
    aten.clamp_max: lambda x, high: _clamp(x, None, high),
    aten.maximum: _pair(torch.maximum),
    aten.minimum: _pair(torch.minimum),
    aten.where: _where,
    aten.index_put: _masked,
    aten.masked_fill: lambda x, mask, value: _where(mask, value, x),
    aten.full_like: _filled,
    aten.fill: _filled,
    aten.scalar_tensor: _first,
    aten.copy: lambda x, y, *_: y if not _elements(x) or y.shape == x.shape else for_elements(y).expand(x.shape),
    **{
        packet: _first
        for packet in (aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten._local_scalar_dense)
    },
    **{getattr(aten, name): _pair(fn) for name, fn in COMPARED.items()},
    torch.sym_sqrt: _one(torch.sqrt),
    torch.sym_float: _first,
}


class OnTensors(Interpreter):
    """Runs a captured graph with 0-d FP64 tensors in the places of numbers.

    Raises:
        TakesNumbers: as the class says.
    """

    def __init__(self, graph: GraphModule, numbers: int) -> None:
        super().__init__(graph)
        self._numbers = [*graph.graph.find_nodes(op="placeholder")][:numbers]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        constant = super().get_attr(target, args, kwargs)
        return constant.item() if isinstance(constant, Tensor) and constant.numel() == 1 else constant

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        form = FORMS.get(getattr(target, "overloadpacket", target))
        values = private.tree_leaves((args, kwargs))
        tensors = [x for x in values if isinstance(x, Tensor)]
        known = all(x.dtype in (*KINDS, torch.float64) for x in tensors)
        if not known and any(map(is_one, tensors)):
            if not any(x.dtype == torch.float32 and x.dim() for x in tensors):
                raise TakesNumbers(self._behind(n))  # FP32 numbers would be rounded to 16 bits, or widen what is not
            args, kwargs = private.tree_map_only(
                Tensor, lambda x: x if x.dtype in KINDS or is_one(x) else x.float(), (args, kwargs)
            )
            known = True
        if form is not None and known:
            return form(*args, **kwargs)
        if not any(map(is_one, tensors)):
            return target(*args, **kwargs)
        if _elements(*values):
            args, kwargs = private.tree_map_only(Tensor, for_elements, (args, kwargs))
        try:
            return target(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            raise TakesNumbers(self._behind(n)) from error

    def _behind(self, node: Node) -> set[int]:
        """Which numbers the numbers among a node's arguments are made of."""
        made_of = behind([each for each in node.all_input_nodes if is_one(self.env.get(each))])
        return {i for i, each in enumerate(self._numbers) if each in made_of}
