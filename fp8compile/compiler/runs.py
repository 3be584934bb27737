"""How often each graph of a step runs: which calls hold what they saved for backward at the same time.

A block that is compiled once and called eight times holds eight times what its graph saves. Three compilations of one model,
for three batch sizes, hold the bytes of one. So what counts is what is alive when a step has run its forwards and begins its
backward. A call is alive from its forward to its backward, or until autograd frees it. A step begins when no call is alive.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fp8compile.compiler.recorded_calls import on_recorded_call

_number = itertools.count()


class Step:
    """The calls of one step: ``most`` holds those of each graph at the moment when the most calls were alive."""

    def __init__(self) -> None:
        self.number = next(_number)
        self.most: Counter[Runs] = Counter()


class Runs:
    """The calls of one compiled graph: those that are alive, and the last step that had any."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.step: Step | None = None


_known: weakref.WeakSet[Runs] = weakref.WeakSet()
_step = Step()


def in_last_step(graphs: Iterable[Runs]) -> list[int | None]:
    """For each graph, how many calls were alive at once in the last step that called any of them; None without one."""
    graphs = list(graphs)
    last = max((g.step for g in graphs if g.step), key=lambda step: step.number, default=None)
    return [last.most[g] if last else None for g in graphs]


def counted(compiled: Callable[..., Any], runs: Runs) -> Callable[..., Any]:
    """``compiled``, whose calls that autograd records are counted in ``runs``."""
    _known.add(runs)
    return on_recorded_call(compiled, functools.partial(_begin, runs))


def _begin(runs: Runs, args: Any, results: Any, backward: Any) -> None:
    global _step
    if not any(known.alive for known in _known):
        _step = Step()
    runs.alive.add(backward)
    runs.step = _step
    backward.register_prehook(functools.partial(_end, weakref.ref(runs), weakref.ref(backward)))
    alive = Counter({known: len(known.alive) for known in _known})
    if alive.total() >= _step.most.total():
        _step.most = alive


def _end(runs: weakref.ref[Runs], backward: weakref.ref[Any], gradients: Any) -> None:
    known, node = runs(), backward()
    if known is not None and node is not None:
        known.alive.discard(node)
