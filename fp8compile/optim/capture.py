"""The step of any torch.optim.Optimizer for one parameter, captured as a graph: what is rewritten is what the optimizer does.

    graph(numbers ..., p, g, states ...) -> p', states' ...

``numbers`` are the floats of the parameter group, so that a change of one captures nothing anew: they are traced as symbols.
What Python decided by their values is kept as guards. Everything else in the group is fixed in the graph.
The optimizer's own ``step`` runs on fake tensors, as torch.compile would have it run: nothing of it is known here by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from fp8compile import _torch as private
from fp8compile.optim.standing_in import NotCaptured, own_attributes, plain_step, standing_in, unchanged

Path = tuple[Any, ...]  # ("betas", 0)
# One formula on every device; ``capturable`` where a step decides nothing by values on the host.
ONE_BY_ONE = {"foreach": False, "fused": False, "differentiable": False}
RANDOM = "its step draws random numbers"
BY_VALUES = "its step decides by values of tensors"


@dataclass(frozen=True)
class Captured:
    """One step as a graph.

    Attributes:
        graph: takes the numbers as floats, the parameter, its gradient and its states; returns the new parameter and states.
        numbers: where the numbers are in the parameter group.
        constants: numbers that are fixed in it.
        states: names of the states that it takes, in order.
        returned: names of the states that it returns, in order: a first step makes some.
        symbols: the numbers in the guards.
        guards: what has to hold of the numbers, as sympy has it.
    """

    graph: GraphModule
    numbers: tuple[Path, ...]
    constants: tuple[tuple[Path, float], ...]
    states: tuple[str, ...]
    returned: tuple[str, ...]
    symbols: tuple[Any, ...]
    guards: tuple[Any, ...]

    def holds(self, group: Mapping[str, Any]) -> bool:
        """Whether the graph is that of a group with these numbers. Of tensors nothing was asked."""
        numbers = numbers_in(group)
        fixed = dict(self.constants)
        if numbers.keys() != {*self.numbers, *fixed} or any(isinstance(numbers[path], Tensor) for path in fixed):
            return False  # an option that was no number is one, or the other way round
        if any(numbers[path] != value for path, value in fixed.items()):
            return False
        values = [0.0 if isinstance(value := numbers[path], Tensor) else value for path in self.numbers]
        known = dict(zip(self.symbols, values, strict=True))
        return all(guard.xreplace(known) == True for guard in self.guards)  # noqa: E712


def run_as(group: Mapping[str, Any], *, capturable: bool) -> dict[str, Any]:
    """A parameter group whose step is run one parameter at a time."""
    ways = {**ONE_BY_ONE, "capturable": capturable}
    return dict(group) | {name: value for name, value in ways.items() if name in group}


def numbers_in(group: Mapping[str, Any]) -> dict[Path, float | Tensor]:
    """The numbers of a parameter group: floats, and tensors of one element."""
    return {path: value for name in group if name != "params" for path, value in _numbers(group[name], (name,))}


def _numbers(value: Any, path: Path) -> Iterator[tuple[Path, float | Tensor]]:
    if type(value) is float or (isinstance(value, Tensor) and value.numel() == 1):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, each in enumerate(value):
            yield from _numbers(each, (*path, i))


def with_number(value: Any, path: Path, number: Any) -> Any:
    """``value`` with a number in the place that ``path`` leads to."""
    if not path:
        return number
    several = list(value)
    several[path[0]] = with_number(several[path[0]], path[1:], number)
    return type(value)(several)


def capture(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: Sequence[int],
    states: Mapping[str, Any],
    *,
    capturable: bool,
    fixed: frozenset[Path] = frozenset(),
) -> Captured:
    """Capture the step of a parameter of ``shape``, in FP32.

    Args:
        states: its states by name, as fake or real tensors of which only layout and dtype matter; none: its first step.
        capturable: run the way that torch.optim has for CUDA graphs, where there is one.
        fixed: numbers that are constants of the graph.

    Raises:
        NotCaptured: the reason.
    """
    given = numbers_in(group)
    places = tuple(path for path in given if path not in fixed)
    options = run_as(group, capturable=capturable)
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = private.FakeTensorMode(shape_env=env)
    returned: list[str] = []
    attributes = own_attributes(optimizer)

    def step(numbers: list[Any], p: Tensor, g: Tensor, *values: Tensor) -> list[Tensor]:
        mine = dict(options)
        for path, number in zip(places, numbers, strict=True):
            mine[path[0]] = with_number(mine[path[0]], path[1:], number)
        q = p.clone()
        q.grad = g
        state = dict(zip(states, (each.clone() for each in values), strict=True))
        alone = standing_in(optimizer, mine, q, state, attributes)
        with unchanged(alone), torch.no_grad():
            plain_step(optimizer)(alone)
        returned[:] = list(alone.state[q])
        return [q, *alone.state[q].values()]

    with mode:
        p, g = (torch.empty(tuple(shape), dtype=torch.float32) for _ in range(2))
        values = [torch.empty(each.shape, dtype=torch.float32) for each in states.values()]
    symbols = [_symbol(env, f"n{i}", given[path]) for i, path in enumerate(places)]
    named = tuple(symbol.node.expr for symbol in symbols)  # before a guard makes a number of one
    graph = _traced(step, [symbols, p, g, *values])
    guards = tuple(guard.expr for guard in env.guards)
    in_tensors = {symbol for symbol, path in zip(named, places, strict=True) if isinstance(given[path], Tensor)}
    if any(guard.free_symbols & in_tensors for guard in guards):
        raise NotCaptured(BY_VALUES)
    constants = tuple((path, _known(given[path], path)) for path in sorted(fixed, key=str))
    return Captured(graph, places, constants, tuple(states), tuple(returned), named, guards)


def _known(value: float | Tensor, path: Path) -> float:
    if isinstance(value, Tensor):
        raise NotCaptured(f"{path[0]} is a tensor, and an operation takes it as a number: pass a float")
    return value


def _symbol(env: ShapeEnv, name: str, value: float | Tensor) -> Any:
    number, source = float(value), private.ConstantSource(name)
    symbol = env.create_unspecified_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=number, source=source)


def _traced(step: Callable[..., Any], args: list[Any]) -> GraphModule:
    try:
        with _as_compiled():
            graph = private.make_fx(torch.func.functionalize(step), tracing_mode="symbolic", decomposition_table={})(
                *args
            )
    except GuardOnDataDependentSymNode as error:
        raise NotCaptured(BY_VALUES) from error
    except NotCaptured:
        raise
    except Exception as error:
        raise NotCaptured(f"its step cannot be traced: {type(error).__name__}: {error}".splitlines()[0]) from error
    graph.graph.eliminate_dead_code()
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes):
        raise NotCaptured(RANDOM)
    return graph


@contextlib.contextmanager
def fp32_by_default() -> Iterator[None]:
    """Whatever the user's default dtype is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _as_compiled() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true: steps on the host stay tensors. ``math.sqrt`` takes symbols and tensors.
    ``symbol ** tensor`` asks nothing of the symbol (torch 2.11: whether it is 1 or 2)."""
    root, power = math.sqrt, Tensor.__rpow__

    def sqrt(x: Any) -> Any:
        if isinstance(x, Tensor):  # a number of the step that Python would have
            return x.sqrt()
        return torch.sym_sqrt(x) if isinstance(x, (torch.SymFloat, torch.SymInt)) else root(x)

    def rpow(exponent: Tensor, base: Any) -> Tensor:
        if not isinstance(base, torch.SymFloat):
            return power(exponent, base)
        symbol: Any = base
        return torch.pow(torch.scalar_tensor(symbol, dtype=exponent.dtype), exponent)

    made: Any = {name: _of_symbols(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    with (
        mock.patch.object(torch.compiler, "_is_compiling_flag", True),
        mock.patch.object(math, "sqrt", sqrt),
        mock.patch.object(Tensor, "__rpow__", rpow),
        mock.patch.multiple(torch, **made),
    ):
        yield


def _of_symbols(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` that takes a symbol, and asks nothing of its value."""

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, (torch.SymFloat, torch.SymInt)):
            symbol: Any = data
            return torch.scalar_tensor(symbol, **{key: kwargs[key] for key in kwargs if key != "requires_grad"})
        return make(data, *args, **kwargs)

    return tensor
