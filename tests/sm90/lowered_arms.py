"""What the arms of a benchmark of kernels launch on an H100: the calls that are timed, made once, lowered and not run.

A compiled function runs nothing and answers with uninitialised tensors; the graphs that it would have launched are noted by
the lap that they belong to. Inputs are uninitialised too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fp8compile.recipe.recipe import Recipe

from .lowering import Backend, Lowered, LoweredGraph, lower_backend, lowering_config, stock_backend
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

Call = Callable[[Callable[[str], None]], object]
COMPILE = torch.compile


class Laps:
    """``lap(name)`` ends a lap: graphs that ran since the last one are its own."""

    def __init__(self) -> None:
        self.graphs: dict[str, list[LoweredGraph]] = {}
        self._since: list[LoweredGraph] = []

    def __call__(self, name: str) -> None:
        self.graphs.setdefault(name, []).extend(self._since)
        self._since.clear()

    def ran(self, graph: LoweredGraph) -> None:
        """Note that a graph was launched."""
        self._since.append(graph)

    def inner_compile(self, gm: Any, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Lower a graph; where it is called, note it."""
        lowered = Lowered()
        answer = lower_backend(lowered)(gm, example_inputs, **options)

        def run(args: list[Any]) -> Any:
            self.ran(lowered.only)
            return answer(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextmanager
def lowering_in_place_of_running() -> Iterator[Laps]:
    """``torch.compile`` lowers for an H100."""
    laps = Laps()

    def compiled(function: Any, *, backend: Any = "inductor", options: Any = None, **more: Any) -> Any:
        chosen = _backend(backend, options)
        return COMPILE(function, backend=lambda gm, inputs: chosen(gm, inputs, laps.inner_compile), **more)

    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", compiled), lowering_config({JOINT_PASS: to_cuda}):
        yield laps


def _backend(name: Any, options: Mapping[str, Any] | None) -> Backend:
    """Inductor, or ours by its recipe; codes are multiplied as an H100 does it."""
    if name == "inductor":
        return stock_backend
    given = {key: value for key, value in (options or {}).items() if key not in ("preset", "emulate")}
    return fp8compile_backend(Recipe.preset((options or {})["preset"], **given))


@contextmanager
def uninitialised_tensors() -> Iterator[None]:
    """In the place of random ones: they take neither time nor memory. Not while something compiles, which looks at them."""
    with mock.patch.multiple(torch, randn=torch.empty, randn_like=torch.empty_like):
        yield


def graphs_of(call: Call, laps: Laps) -> dict[str, list[LoweredGraph]]:
    """By lap, what one call launches."""
    laps.graphs = {}
    call(laps)
    return laps.graphs
