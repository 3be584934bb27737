"""One step of a model under one recipe after another: captured once, compiled for each recipe, all else the same.

    Dynamo graph, kept  --passes of the recipe-->  forward and backward, run node by node  -->  gradients, outputs
                                                                         or as generated code

Dynamo keeps what it compiled and counts it, for as long as the code lives. So one capture serves every recipe, and what was
compiled for one recipe is dropped when the next is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.inductor import compile_once
from fp8compile.compiler.inputs import cuda_devices, dtypes_of, trains
from fp8compile.compiler.node_by_node import boxed, run_the_graph
from fp8compile.compiler.seeded_random import draw_from_seeds
from fp8compile.fx.graph import copy_with_attributes
from fp8compile.numerics.gradient_quality import NUDGES, GradientJudge, Gradients, last_place, nudged
from fp8compile.recipe.recipe import Recipe, exact
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.tools.trial_step import (
    LIMIT,
    NOTHING_TO_DIFFERENTIATE,
    default_loss,
    left_as_it_was,
    named_arguments,
    one_step,
)

log = logging.getLogger("fp8compile")

OUTPUT = "output"  # what the model's outputs are called, with the way to each: "output['logits']"


class Generating:
    """Inductor's inner compiler, but that random numbers are those of the graph that runs node by node; counts the runs."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        draw_from_seeds(gm, generates=True)
        compiled: Any = private.compile_fx_inner(gm, example_inputs, **kwargs)

        def run(*values: Any) -> Any:
            self.ran += 1
            return compiled([*values])

        return boxed(run)


@dataclass(frozen=True)
class Trial:
    """One step: gradients and floating-point outputs by name, what was done to its graphs, whether generated code ran."""

    values: Gradients
    reports: tuple[GraphReport, ...]
    generated: bool


class Trials:
    """Steps of ``model`` on one batch, each from the same buffers and random numbers; these are restored afterwards."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None
    ) -> None:
        self.model, self.args, self.kwargs, self.loss = model, args, kwargs, loss
        self.compiled: Any = torch.compile(model, backend=self._capture)
        self.parameters = [name for name, p in model.named_parameters() if p.requires_grad]
        self.arguments = [name for name, value in named_arguments(args, kwargs) if trains(value)]
        self.recipe = Recipe()
        self.nudge: int | None = None
        self.generate: Generating | None = None
        self.outputs: dict[str, Tensor] = {}
        self.count = 0
        self._graphs: list[_Captured] = []
        self._ran: list[_Captured] = []

    def step(self, recipe: Recipe, nudge: int | None = None, generate: Generating | None = None) -> Trial:
        """A step with ``recipe``; with ``nudge``, a seed, from parameters that are moved by one last place.

        It runs node by node, or what ``generate`` makes of the graphs; what was compiled for it once is kept.

        Raises:
            ValueError: no graph was compiled, or there is nothing to differentiate.
        """
        self.recipe, self.nudge, self.generate, self._ran = recipe, nudge, generate, []
        self.count += 1
        with left_as_it_was(self.model), private.dynamo_config.patch(recompile_limit=LIMIT):
            found = one_step(self.compiled, self.args, self.kwargs, self._loss)
        if not self._ran:
            raise ValueError(f"fp8compile.check: {report_store.NO_GRAPH_COMPILED}")
        if not found:
            raise ValueError(NOTHING_TO_DIFFERENTIATE.format("check"))
        log.info("check: step %d with %s", self.count, recipe)
        reports = tuple(report for graph in self._ran for report in graph.reports)
        gradients = dict(zip((*self.parameters, *self.arguments), found, strict=True))
        return Trial(gradients | self.outputs, reports, generate is not None and generate.ran > 0)

    def judged(self, recipe: Recipe, bar: float) -> tuple[Gradients, GradientJudge]:
        """What the exact step gives, outputs too, and a judge of other steps: it is run again from moved parameters."""
        plain = exact(recipe)
        values = self.step(plain).values
        again = (self.step(plain, nudge=seed).values for seed in range(NUDGES))
        return values, GradientJudge.of(values, again, bar, frozenset(self.arguments), frozenset(self.outputs))

    def _loss(self, output: Any) -> Tensor | None:
        leaves = pytree.tree_flatten_with_path(output)[0]
        self.outputs = {
            OUTPUT + pytree.keystr(path): value.detach()
            for path, value in leaves
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return (self.loss or default_loss)(output)

    def close(self) -> None:
        """Drop what was compiled; Dynamo keeps an empty shell."""
        for graph in self._graphs:
            graph.forget()
        self._graphs, self._ran = [], []

    def _capture(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = _Captured(self, gm, example_inputs)
        graph.compile()  # here, where Dynamo can start again if a number turns out to be one that it cannot trace
        self._graphs.append(graph)
        return graph.call  # of an object Dynamo would copy the attributes, and keep what they hold

    def ran(self, graph: _Captured) -> None:
        if graph not in self._ran:
            self._ran.append(graph)


class _Captured:
    """One Dynamo graph, to be compiled for each recipe that is tried."""

    def __init__(self, trials: Trials, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.trials = trials
        self.graph: Any = copy_with_attributes(gm)
        self.inputs: Sequence[Any] = tuple(example_inputs)
        self.context = private.TracingContext.try_get()
        self.step = last_place(dtypes_of(gm, example_inputs))
        self.made: tuple[Recipe, Generating | None] | None = None
        self.run: Callable[..., Any] | None = None
        self.reports: tuple[GraphReport, ...] = ()

    def call(self, *args: Any) -> Any:
        """Run it, compiled for the recipe that is tried now."""
        self.trials.ran(self)
        if self.run is None or self.made != (self.trials.recipe, self.trials.generate):
            self.compile()
        assert self.run is not None
        return self.run(*(self._moved(args) if self.trials.nudge is not None else args))

    def compile(self) -> None:
        """Compile the graph as it is tried now; this replaces what was compiled before."""
        recipe, generate = self.trials.recipe, self.trials.generate
        # Normally Dynamo keeps compilation from using up the step's random numbers; here we have to.
        with private.tracing(self.context), torch.random.fork_rng(cuda_devices(self.inputs)):
            run, self.reports, _ = compile_once(
                copy_with_attributes(self.graph), self.inputs, recipe, None, generate or run_the_graph
            )
        self.run, self.made = run, (recipe, generate)

    def _moved(self, args: Sequence[Any]) -> Iterator[Any]:
        generators: dict[torch.device, torch.Generator] = {}
        for value in args:
            if trains(value):
                if value.device not in generators:
                    assert self.trials.nudge is not None
                    generators[value.device] = torch.Generator(value.device).manual_seed(self.trials.nudge)
                value = nudged(value, self.step, generators[value.device])
            yield value

    def forget(self) -> None:
        self.graph, self.inputs, self.context, self.run, self.reports = None, (), None, None, ()
