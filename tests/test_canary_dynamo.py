"""Canaries of what fp8compile/_torch.py needs of torch.compile and Dynamo: guards, code caches, what they tell."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8compile import _torch as private


def test_dynamo_says_where_a_graph_ends() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    seen: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.append(private.ends_at_graph_break(gm))
        return gm

    torch._dynamo.reset()
    torch.compile(broken, backend=backend)(torch.ones(2))
    assert seen == [True, False]
    assert private.ends_at_graph_break(torch.fx.symbolic_trace(lambda x: x)), "nothing is known of it"


@pytest.mark.parametrize("why", ["a branch on a value", "too many graphs"])
def test_what_fullgraph_raises(why: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if why == "too many graphs" or x.sum().item() > 0 else x

    torch._dynamo.reset()
    run = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    with mock.patch.object(private.dynamo_config, "recompile_limit", 1), pytest.raises(private.NO_SINGLE_GRAPH):
        for rows in (2, 3, 4):
            run(torch.ones(rows))


def test_hooks_on_the_steps_of_all_optimizers_are_found() -> None:
    def before(*_: object) -> None: ...

    def after(*_: object) -> None: ...

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    found = [[*hooks.values()] for hooks in private.global_step_hooks]
    for handle in handles:
        handle.remove()
    assert before in found[0] and after in found[1]


def test_dynamo_compiles_again_where_a_guard_does_not_hold() -> None:
    compiled: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
        at = next(i for i, value in enumerate(inputs) if isinstance(value, nn.Parameter))
        known = id(inputs[at])
        private.add_guard(gm.graph.find_nodes(op="placeholder")[at], lambda p: id(p) == known, "the same weight")
        compiled.append(known)
        return gm

    def scaled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x

    torch._dynamo.reset()
    run, modules = torch.compile(scaled, backend=backend), [nn.LayerNorm(4), nn.LayerNorm(4)]
    for module in modules * 2:
        run(module, torch.ones(4))
    assert compiled == [id(module.weight) for module in modules]


class Half(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_torch_compile_was_told_can_be_read_back(fullgraph: bool) -> None:
    """tools/compiled_module.py relies on: ``dynamo_ctx``, ``self`` in the closure, and the wrapper's three attributes."""
    wrapped, in_place = torch.compile(Half(), backend="eager", dynamic=True, fullgraph=fullgraph), Half()
    in_place.compile(backend="eager", options={"a": 1}, fullgraph=fullgraph)
    assert isinstance(wrapped, private.OptimizedModule) and callable(wrapped._initialize)
    closure = inspect.getclosurevars(in_place._compiled_call_impl).nonlocals["self"]  # type: ignore[arg-type]
    for context, dynamic, kwargs in ((wrapped.dynamo_ctx, True, {}), (closure, None, {"options": {"a": 1}})):
        wrapper = private.innermost_backend(context.callback)
        assert (wrapper.dynamic, wrapper.kwargs, context.fullgraph) == (dynamic, kwargs, fullgraph)  # type: ignore[attr-defined]
        assert wrapper.compiler_fn is torch._dynamo.lookup_backend("eager")  # type: ignore[attr-defined]
        assert context._hooks.guard_filter_fn is None


def test_dynamo_compiles_again_for_a_backend_that_is_not_equal() -> None:
    """set_recipe relies on it, and on equal backends sharing code."""

    class Backend:
        calls = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Backend) and self.name == other.name

        def __call__(self, gm, inputs):  # type: ignore[no-untyped-def]
            Backend.calls += 1
            return gm.forward

    model = Half()
    for name, calls in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        torch.compile(model, backend=Backend(name))(torch.ones(2))
        assert Backend.calls == calls


def test_a_recompile_limit_of_the_compilation_can_be_read_back() -> None:
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this torch has only the setting")
    context = torch.compile(Half(), backend="eager", recompile_limit=3).dynamo_ctx
    assert context.callback._torchdynamo_orig_backend._recompile_limit == 3
    assert isinstance(private.dynamo_config.recompile_limit, int)


def test_a_graph_is_compiled_once_more_in_the_context_it_was_traced_in() -> None:
    kept: list[object] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        kept.append(private.TracingContext.try_get())
        return gm

    torch.compile(lambda x: x.sin() * 2, backend=backend)(torch.ones(3))
    (context,) = kept
    with private.tracing(context):  # type: ignore[arg-type]
        assert private.TracingContext.try_get() is context is not None


@pytest.mark.skipif(not private.HAS_REGIONS, reason="this torch has no isolate_recompiles")
def test_a_region_of_the_code_caches_is_read_at_each_call() -> None:
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        seen.append(len(seen))
        return gm

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def compiled() -> Any:
        run: Any = torch.compile(torch.nn.Module(), backend=backend, isolate_recompiles=True)
        run.dynamo_ctx, run.call = run.dynamo_ctx, run.dynamo_ctx(double)
        return run

    first, second = compiled(), compiled()
    for run, graphs in ((first, 1), (second, 2), (first, 2)):
        run.call(torch.ones(3))
        assert len(seen) == graphs, "a region knows nothing of what others compiled"
    third = compiled()
    assert len({private.region_of(each.dynamo_ctx) for each in (first, second, third)}) == 3
    private.use_region(third.dynamo_ctx, private.region_of(first.dynamo_ctx))
    third.call(torch.ones(3))
    assert len(seen) == 2, "it finds what the first one compiled"


def test_a_lazy_graph_module_makes_code_when_it_is_called() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    lazy = private.LazyGraphModule.from_graphmodule(gm)
    lazy.graph.find_nodes(op="call_function", target=operator.add)[0].update_arg(1, 2)
    lazy.recompile()
    assert lazy(1) == 3


def test_the_backend_of_a_module_is_known_by_name_wrapped_and_in_place() -> None:
    model = torch.nn.Linear(2, 2)
    assert private.backend_name(model) is None
    model.compile(backend="eager")
    assert private.backend_name(model) == "eager"
    assert private.backend_name(torch.compile(torch.nn.Linear(2, 2), backend="eager")) == "eager"  # type: ignore[arg-type]


def test_dynamo_tells_what_code_it_was_given_and_how_many_graphs_came_of_it() -> None:
    skipped, taken = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.compile(lambda x: x + 1, backend="eager")
    skipped.compile(backend="eager")
    frames, graphs = private.frames_seen(), private.graphs_captured()
    skipped(torch.ones(1, 2))
    assert private.frames_seen() - frames
    assert private.graphs_captured() == graphs + private.COMPILES_CONTAINERS
    graphs = private.graphs_captured()
    taken(torch.ones(1))
    assert private.graphs_captured() == graphs + 1


def test_the_two_ways_in_which_a_whole_graph_fails_to_compile_are_told_apart() -> None:
    """What Dynamo cannot capture, and what a backend raises, which keeps its exception."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    def refuses(gm: Any, inputs: Sequence[Any]) -> Any:
        raise KeyError("no")

    torch._dynamo.reset()
    with pytest.raises(private.Unsupported):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(2))
    with pytest.raises(private.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=refuses, fullgraph=True)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, KeyError)


def test_a_refusal_of_options_is_handed_on_as_it_is() -> None:
    def refuses(gm: Any, inputs: Sequence[Any]) -> Any:
        raise private.RefusedOptions("preset=3: no", sys._getframe())

    torch._dynamo.reset()
    with pytest.raises(ValueError) as caught:
        torch.compile(lambda x: x + 1, backend=refuses)(torch.ones(2))
    assert type(caught.value) is private.RefusedOptions and str(caught.value).splitlines()[0] == "preset=3: no"
    assert caught.traceback[-1].name == "refuses", "Dynamo's own frames are left out, ours is not"


def test_a_scheduler_warns_where_no_step_was_noted() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="Detected call of"):
        schedule.step()
    optimizer._opt_called = True  # type: ignore[attr-defined]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    schedule.step()
