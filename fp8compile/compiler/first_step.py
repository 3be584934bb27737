"""``options={"check": "first_step"}``: the gradients of the first training step beside those of an exact one.

    forward     the compiled graph runs as usual; copies of its inputs and the state of the random numbers are kept
    backward    a hook on its autograd node sees what comes in (tangents) and what goes out (gradients); there an exact
                twin of the graph runs forward and backward, on the copies, from the same tangents
    compared    gradient by gradient (fp8compile/numerics/gradient_quality.py); a warning names each below the bar, once

Where graph breaks split a model, each graph is judged by itself, from the tangents that the step really has: an error that
another graph adds is not counted. The twin is the same Dynamo graph with nothing encoded, run node by node. Where it draws
random numbers and the user's graph is generated code, the twin is generated too, since the same seeds give other numbers
there. The user's results come from the user's code, and random numbers go on as if nothing else had run. In the first step
the copies take memory, and so does the twin's step during the backward. Then twin and copies are gone, and what stays is one
call of a function.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.apart import compiled_apart
from fp8compile.compiler.inductor import compile_once
from fp8compile.compiler.inputs import cuda_devices, dtypes_of, trains
from fp8compile.compiler.node_by_node import run_the_graph
from fp8compile.fx.ops import draws_random_numbers, is_collective
from fp8compile.fx.provenance import parameter_path
from fp8compile.numerics.gradient_quality import (
    BAR,
    NUDGES,
    GradientJudge,
    Gradients,
    error_powers,
    last_place,
    nudged,
)
from fp8compile.recipe.recipe import Recipe, exact

log = logging.getLogger("fp8compile")

BELOW = (
    "debug.check='first_step': {} of {} gradients of this graph are below {:g} dB of the exact ones: {}. "
    "fp8compile.check(model, batch) finds the cause and a recipe without it"
)
LOST = "debug.check='first_step': the gradients of {} could not be told apart in the graph's backward, and were not compared"
RANKS = (
    "debug.check='first_step': a graph that exchanges values with other ranks is not compared: the check takes more steps "
    "where gradients are off, and a rank that takes them alone would wait for the others forever"
)
UNSEEN = (
    "debug.check='first_step': a graph has inputs that train and no backward of its own that could be looked at: "
    "not compared"
)


def checked_first_step(
    compiled: Callable[..., Any], gm: GraphModule, example_inputs: Sequence[Any], recipe: Recipe
) -> Callable[..., Any]:
    """``compiled`` with its first training step checked, by ``gm``, a spare copy of its graph; itself in inference."""
    if not (torch.is_grad_enabled() and any(map(trains, example_inputs))):
        return compiled
    if _exchanges(gm, example_inputs):
        log.warning(RANKS)
        return compiled
    names = {}
    for index, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        if trains(value):
            names[index] = parameter_path(node) if isinstance(value, nn.Parameter) else f"the input {node.name}"
    arguments = {names[i] for i in names if not isinstance(example_inputs[i], nn.Parameter)}
    step = last_place(dtypes_of(gm, example_inputs))
    with compiled_apart():
        twin, _, _ = compile_once(gm, example_inputs, exact(recipe), None, _inner_for(recipe))
    return _FirstStep(compiled, _Twin(twin, names, arguments, step)).run


def _exchanges(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether ranks meet in a graph: it holds collectives, or a sharded tensor that brings them."""
    return any(map(is_collective, gm.graph.nodes)) or any(isinstance(value, DTensor) for value in example_inputs)


def _inner_for(recipe: Recipe) -> Callable[..., Any]:
    """Node by node; but Inductor's own compiler for a graph that draws random numbers, where the user's is generated."""

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if recipe.debug.codegen == "inductor" and any(map(_is_random, gm.graph.nodes)):
            return private.compile_fx_inner(gm, example_inputs, **kwargs)
        return run_the_graph(gm, example_inputs, **kwargs)

    return inner


def _is_random(node: torch.fx.Node) -> bool:
    return draws_random_numbers(node) or node.target in (private.inductor_random, private.inductor_randint)


class _Twin:
    """The exact graph, and what the inputs that train are called."""

    def __init__(self, run: Callable[..., Any], names: Mapping[int, str], arguments: set[str], step: float) -> None:
        self.run, self.names, self.arguments, self.step = run, names, arguments, step

    def gradients(
        self, inputs: Sequence[Any], tangents: Sequence[Tensor | None], nudge: int | None = None
    ) -> Gradients:
        """The gradients of a step on copies of ``inputs``, from the tangents of the user's step."""
        own = copied(inputs)
        leaves = {i: own[i] for i in self.names}
        if nudge is not None:
            generators = {v.device: torch.Generator(v.device).manual_seed(nudge) for v in leaves.values()}
            for i, leaf in leaves.items():
                own[i] = nudged(leaf, self.step, generators[leaf.device])
        before = private.producers(own)
        outputs = self.run(*own)
        node = private.compiled_backward((outputs, own), before)
        edges = [(torch.autograd.graph.GradientEdge(node, i), t) for i, t in enumerate(tangents) if t is not None]
        starts, given = [edge for edge, _ in edges], [tangent for _, tangent in edges]
        found = torch.autograd.grad(starts, list(leaves.values()), given, allow_unused=True)
        return {self.names[i]: gradient for i, gradient in zip(leaves, found, strict=True)}


class _FirstStep:
    """The compiled graph. Until one of its backwards has been compared, it keeps the twin.

    Dynamo gets ``run``, a method: of an object it would copy the attributes, and so keep the twin alive forever.
    """

    def __init__(self, compiled: Callable[..., Any], twin: _Twin) -> None:
        self.compiled = compiled
        self.twin: _Twin | None = twin
        self.pending: weakref.ref[_Trial] | None = None

    def run(self, *args: Any) -> Any:
        """Call the compiled graph; the first time that a backward may follow, prepare the comparison."""
        waiting = self.pending is not None and self.pending() is not None
        if self.twin is None or waiting or not torch.is_grad_enabled():
            return self.compiled(*args)
        trial = _Trial(self, copied(args))
        before = private.producers(args)
        outputs = self.compiled(*args)
        node = private.compiled_backward((outputs, args), before)
        if node is None:
            log.warning(UNSEEN)
            self.twin = None
            return outputs
        trial.places = _places(node, args, self.twin.names)
        node.register_hook(trial.compare)
        self.pending = weakref.ref(trial)  # lives as long as the autograd graph whose backward may run
        return outputs


class _Trial:
    """One call: what it was called with, and where its gradients come out."""

    def __init__(self, owner: _FirstStep, inputs: list[Any]) -> None:
        self.owner, self.inputs = owner, inputs
        self.devices = cuda_devices(inputs)
        self.random = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self.devices]
        self.places: dict[int, int] = {}  # by input, the position of its gradient among those that the node returns

    def compare(self, found: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> None:
        """The hook, called with the node's gradients and tangents."""
        twin, inputs = self.owner.twin, self.inputs
        if twin is None:
            return
        self.owner.twin, self.inputs = None, []
        got = {twin.names[i]: found[place] for i, place in self.places.items()}
        lost = [name for i, name in twin.names.items() if i not in self.places]
        if lost:
            log.warning(LOST.format(", ".join(lost)))

        def step(nudge: int | None = None) -> Gradients:
            with self._random_as_it_was(), torch.enable_grad():
                gradients = twin.gradients(inputs, tangents, nudge)
            return {name: gradient for name, gradient in gradients.items() if name in got}

        _tell(step, got, twin.arguments)

    @contextlib.contextmanager
    def _random_as_it_was(self) -> Iterator[None]:
        with torch.random.fork_rng(self.devices):
            state, states = self.random
            torch.set_rng_state(state)
            for device, of_device in zip(self.devices, states, strict=True):
                torch.cuda.set_rng_state(of_device, device)
            yield


def _tell(step: Callable[[int | None], Gradients], got: Gradients, arguments: set[str]) -> None:
    reference = step(None)
    errors = error_powers(reference, got)
    judge = GradientJudge.of(reference, (), BAR, arguments)
    if judge.failing(errors):  # only then find out which of them are down to rounding
        judge = GradientJudge.of(reference, map(step, range(NUDGES)), BAR, arguments)
    failing = sorted(judge.failing(errors), key=lambda name: judge.sqnr(name, errors[name]))
    if failing:
        listed = ", ".join(f"{name} {judge.sqnr(name, errors[name]):.1f} dB" for name in failing)
        log.warning(BELOW.format(len(failing), len(errors), BAR, listed))
    else:
        worst = min((judge.sqnr(name, error) for name, error in errors.items()), default=float("inf"))
        log.info(
            "debug.check='first_step': all %d gradients of a graph are well, the worst at %.1f dB", len(errors), worst
        )


def _places(node: Any, args: Sequence[Any], names: Mapping[int, str]) -> dict[int, int]:
    """For each input, the position of its gradient among a node's results, found by where that gradient goes."""
    edges = [(id(edge), number, getattr(edge, "variable", None)) for edge, number in node.next_functions]
    places = {}
    for index in names:
        value = args[index]
        for place, (edge, number, variable) in enumerate(edges):
            if value is variable or (
                value.grad_fn is not None and (id(value.grad_fn), value.output_nr) == (edge, number)
            ):
                places[index] = place
    return places


def copied(values: Sequence[Any]) -> list[Any]:
    """Copies of all tensors, each a leaf, with their strides; tensors that share memory share the copy of it."""
    storages: dict[int, list[Tensor]] = {}
    for value in values:
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            storages.setdefault(value.untyped_storage()._cdata, []).append(value)
    shared = {
        key: alike[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
        for key, alike in storages.items()
        if len({id(value) for value in alike}) > 1
    }
    done: dict[int, Any] = {}
    return [done.setdefault(id(v), _copy(v, shared)) if isinstance(v, Tensor) else v for v in values]


def _copy(value: Tensor, shared: Mapping[int, torch.UntypedStorage]) -> Tensor:
    still = value.detach()
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return still.clone().requires_grad_(value.requires_grad)
    size, stride, offset = still.size(), still.stride(), still.storage_offset()
    if (storage := shared.get(value.untyped_storage()._cdata)) is not None:
        fresh = torch.empty(0, dtype=still.dtype, device=still.device).set_(storage, offset, size, stride)
    else:
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if still.numel() else 0
        fresh = still.as_strided((extent,), (1,), offset).clone().as_strided(size, stride)
    return fresh.detach().requires_grad_(value.requires_grad)
