"""A model compiled for one recipe, beside others of the same model; what it was compiled to can be dropped.

The code goes through a backend of the arm's own: Dynamo keeps a shell of it, and ``fp8compile.report`` has no entry of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.inductor import compile_and_report
from fp8compile.compiler.store_check import check_stores_first, prepare_ptxas
from fp8compile.tools.tuning.arms import TunedArm


class CompiledArm:
    """``model`` compiled as ``arm`` says: ``self.model`` is to be called."""

    def __init__(self, model: nn.Module, arm: TunedArm) -> None:
        self.arm = arm
        self.graphs: list[_Kept] = []
        self.model: Any = torch.compile(model, backend=self._compile)

    def forget(self) -> None:
        """Drop what was compiled; afterwards the model cannot be called."""
        for graph in self.graphs:
            graph.run = None

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.arm.is_plain:
            run: Any = private.compile_fx(gm, example_inputs)  # what backend="inductor" calls
        else:
            prepare_ptxas(example_inputs)
            run, _ = compile_and_report(gm, example_inputs, self.arm.recipe)
            run = check_stores_first(run, example_inputs)
        self.graphs.append(_Kept(run))
        return self.graphs[-1].call  # of an object Dynamo would copy the attributes, and keep what they hold


class _Kept:
    """One compiled graph, until it is dropped."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run: Callable[..., Any] | None = run

    def call(self, *args: Any) -> Any:
        assert self.run is not None, "dropped"
        return self.run(*args)
