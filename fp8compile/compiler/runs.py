"""How often each graph of a step runs, and on whose parameters: which calls hold what they saved for backward at one time.

A block that is compiled once and called eight times holds eight times what its graph saves. Three compilations of one model,
for three batch sizes, hold the bytes of one. So what counts is what is alive when a step has run its forwards and begins its
backward. A call is alive from its forward to its backward, or until autograd frees it. A step begins when no call is alive.

One graph may serve many modules, each with parameters of its own: these are its instances.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fp8compile.compiler.recorded_calls import on_recorded_call

_number = itertools.count()


class StepCalls:
    """The calls of one step: ``most`` holds those of each instance at the moment when the most calls were alive."""

    def __init__(self) -> None:
        self.number = next(_number)
        self.most: Counter[Instance] = Counter()


class Instance:
    """The parameters that a graph was called with, in the order of its inputs."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(map(weakref.ref, parameters))

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        return all(ref() is p for ref, p in zip(self.parameters, parameters, strict=True))

    @property
    def alive(self) -> set[int]:
        """The identities of its parameters that still exist."""
        return {id(p) for ref in self.parameters if (p := ref()) is not None}


class Runs:
    """The calls of one compiled graph: those that are alive, its instances, and the last step that had any call."""

    def __init__(self, example_inputs: Sequence[Any] = ()) -> None:
        self.positions = [at for at, value in enumerate(example_inputs) if isinstance(value, nn.Parameter)]
        self.alive: weakref.WeakKeyDictionary[Any, Instance] = weakref.WeakKeyDictionary()
        self.step: StepCalls | None = None
        self._instances: dict[tuple[int, ...], Instance] = {}
        self.first = self.instance_of(example_inputs)

    def instance_of(self, inputs: Sequence[Any]) -> Instance:
        """The instance that is called with these inputs."""
        parameters = [inputs[at] for at in self.positions]
        key = tuple(map(id, parameters))
        known = self._instances.get(key)
        if known is None or not known.is_of(parameters):
            self._instances = {k: i for k, i in self._instances.items() if i.alive}
            known = self._instances[key] = Instance(parameters)
        return known

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Those whose parameters exist, in the order of their first calls; of a graph without parameters its only one."""
        return tuple(i for i in self._instances.values() if i.alive or not self.positions)


_known: weakref.WeakSet[Runs] = weakref.WeakSet()
_step = StepCalls()


def in_last_step(graphs: Iterable[Runs]) -> Mapping[Instance, int] | None:
    """How many calls of each instance were alive at once in the last step that called any of the graphs; None without one."""
    last = max((g.step for g in graphs if g.step), key=lambda step: step.number, default=None)
    return last.most if last else None


def counted(compiled: Callable[..., Any], runs: Runs) -> Callable[..., Any]:
    """``compiled``, whose calls that autograd records are counted in ``runs``."""
    _known.add(runs)
    return on_recorded_call(compiled, functools.partial(_begin, runs))


def _begin(runs: Runs, args: Any, results: Any, backward: Any) -> None:
    global _step
    if not any(known.alive for known in _known):
        _step = StepCalls()
    runs.alive[backward] = runs.instance_of(args)
    runs.step = _step
    backward.register_prehook(functools.partial(_end, weakref.ref(runs), weakref.ref(backward)))
    alive = Counter(instance for known in _known for instance in known.alive.values())
    if alive.total() >= _step.most.total():
        _step.most = alive


def _end(runs: weakref.ref[Runs], backward: weakref.ref[Any], gradients: Any) -> None:
    known, node = runs(), backward()
    if known is not None and node is not None:
        known.alive.pop(node, None)
