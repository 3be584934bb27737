"""One canary for each private torch API in fp8compile/_torch.py: says which one moved, and what we need of it."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile import _torch as private
from fp8compile._version import release_of
from fp8compile.compiler.inductor_options import FUSION


@pytest.mark.parametrize("name", private.__all__)
def test_it_is_still_there(name: str) -> None:
    assert hasattr(private, name)


def parameters(fn: object) -> set[str]:
    return set(inspect.signature(fn).parameters)  # type: ignore[arg-type]


def test_compile_fx_takes_an_inner_compiler_and_patches() -> None:
    assert {"inner_compile", "config_patches"} <= parameters(private.compile_fx)


def test_the_partitioner_takes_what_inductor_hands_over() -> None:
    wanted = {"compiler", "num_fwd_outputs", "static_lifetime_input_indices"}
    assert wanted <= parameters(private.min_cut_rematerialization_partition)


def test_the_hooks_and_options_we_set_exist() -> None:
    hooks = ("joint_custom_post_pass", "post_grad_custom_post_pass", "custom_partitioner_fn")
    for option in (*hooks, "post_grad_fusion_options", "disabled_passes"):
        assert hasattr(private.inductor_config, option), option
    assert hasattr(private.functorch_config, "ban_recompute_materialized_backward")
    assert callable(private.functorch_config.save_config_portable)


def test_every_setting_of_fusion_exists_and_an_unknown_one_is_left_out() -> None:
    newer = {"triton.mix_order_reduction_max_reads"} if release_of(torch.__version__) >= (2, 12) else set()
    older = {"realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"}
    assert set(FUSION) == older | newer
    assert private.known_options({"no_such_option": 1, "triton.no_such_option": 1}) == {}


def test_the_scheduler_asks_what_may_be_one_kernel_and_says_what_it_would_hold() -> None:
    virtualized, asked = private.inductor_virtualized, []

    def inner(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        theirs = virtualized.choices
        ours = copy.copy(theirs)

        def can_fuse(scheduler: Any, first: Any, second: Any, score: int) -> bool:
            (write,) = second.read_writes.writes
            steps = virtualized.graph.sizevars.stride_vars(write.index, write.var_names)
            known = {node.get_name() for node in (first, second)} <= set(scheduler.name_to_node)
            leq = virtualized.graph.sizevars.statically_known_leq(steps[-1], 1024)
            dtype = virtualized.graph.get_dtype(write.name)
            cpu = first.get_device().type
            mixed = private.MixOrderReduction.can_fuse(first, second)
            asked.append((isinstance(write, private.MemoryDep), steps[-1], known, leq, dtype, cpu, mixed))
            return bool(theirs.can_fuse(scheduler, first, second, score))

        ours.can_fuse = can_fuse
        with virtualized.set_choices_handler(ours):
            return private.compile_fx_inner(gm, inputs, **kwargs)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y := x.sum(-1)), y.relu() + 1

    backend = functools.partial(
        private.compile_fx, inner_compile=inner, config_patches={"force_disable_caches": True}
    )
    torch.compile(f, backend=backend)(torch.randn(64, 48))
    assert asked[0] == (True, 1, True, True, torch.float32, "cpu", False)


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


def test_a_sympy_expression_has_bounds_for_the_ranges_of_its_symbols() -> None:
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges

    size = sympy.Symbol("s0", integer=True, positive=True)
    found = private.bound_sympy(3 * size, {size: ValueRanges(2, 8)})
    assert (found.lower, found.upper) == (6, 24)


def test_the_structured_trace_goes_to_handlers_with_a_folder(tmp_path: Path) -> None:
    """dump.tracing relies on: torch's handler on trace_log has a root_dir where, and only where, it writes."""
    kind = torch._logging._internal.LazyTraceHandler
    assert kind(None).root_dir is None
    handler = kind(str(tmp_path))
    handler.setFormatter(torch._logging._internal.TorchLogsFormatter(trace=True))
    private.trace_log.addHandler(handler)
    try:
        private.trace_structured("artifact", metadata_fn=lambda: {"name": "seen"}, payload_fn=lambda: "a text")
    finally:
        private.trace_log.removeHandler(handler)
        handler.close()
    [written] = tmp_path.iterdir()
    assert '"seen"' in written.read_text() and "a text" in written.read_text()


def test_the_observer_can_disable_a_pass_by_name() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x)
    with private.inductor_config.patch(disabled_passes="some_pass"):
        assert private.GraphTransformObserver(gm, "some_pass", subsystem="x").apply_gm_pass(lambda _: 1) is None
    assert private.GraphTransformObserver(gm, "some_pass", subsystem="x").apply_gm_pass(lambda _: 1) == 1


def test_saved_values_come_and_go_by_position_with_descriptions() -> None:
    """Split relies on: the forward returns (outputs, values, sizes), the backward takes (sizes, values, tangents)."""
    from fp8compile.fx.partition import PartitionedGraph

    seen = {}

    class Look(private.CustomPartitionerFn):  # type: ignore[misc]
        def uuid(self) -> None:
            return None

        def __call__(self, gm, joint_inputs, **kwargs):  # type: ignore[no-untyped-def]
            fw, bw = private.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            split = PartitionedGraph(fw, bw, kwargs["num_fwd_outputs"], kwargs["static_lifetime_input_indices"])
            seen["names"] = [(e.forward.name, e.backward.name) for e in split.edges]
            seen["needs_grad"] = [n.name for n in split.inputs if n in split.needs_grad]
            seen["static"] = len(split.static)
            return fw, bw

    model = torch.nn.Linear(8, 8)

    def backend(gm, inputs):  # type: ignore[no-untyped-def]
        return private.compile_fx(gm, inputs, config_patches={"custom_partitioner_fn": Look()})

    fn = torch.compile(lambda x: torch.sigmoid(model(x)), backend=backend, dynamic=True)
    fn(torch.randn(4, 8)).sum().backward()
    assert seen["names"] and all(made == used for made, used in seen["names"])
    assert len(seen["needs_grad"]) == 2 and seen["static"] == 2, seen


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
    if "recompile_limit" not in parameters(torch.compile):
        pytest.skip("this torch has only the setting")
    context = torch.compile(Half(), backend="eager", recompile_limit=3).dynamo_ctx
    assert context.callback._torchdynamo_orig_backend._recompile_limit == 3
    assert isinstance(private.dynamo_config.recompile_limit, int)


def test_where_a_shard_begins_and_how_large_it_is() -> None:
    """optim/sharding.py relies on: (sizes, offsets) of this rank's part, uneven ones and empty ones too."""
    from torch.distributed.tensor import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (3,))
        assert private.local_shape_and_offset(torch.Size((7, 5)), mesh, (Shard(0),)) == ((1, 5), (6, 0))
        assert private.local_shape_and_offset(torch.Size((7, 5)), mesh, (Shard(1),)) == ((7, 1), (0, 4))
        assert private.local_shape_and_offset(torch.Size((2, 5)), mesh, (Shard(0),)) == ((0, 5), (2, 0))
    finally:
        torch.distributed.destroy_process_group()


def addcmul_step(v: torch.Tensor, g: torch.Tensor) -> None:
    v.mul_(0.999).addcmul_(g, g, value=0.001)


def test_dynamo_takes_addcmul_apart_as_compiled_addcmul_does() -> None:
    """optim/updates.py relies on it to equal torch.optim's compiled step bit for bit."""
    targets = []

    def backend(gm, inputs):  # type: ignore[no-untyped-def]
        targets.extend(node.target for node in gm.graph.nodes)
        return gm.forward

    torch.compile(addcmul_step, backend=backend)(torch.rand(3), torch.rand(3))
    ours = private.make_fx(private.compiled_addcmul)(torch.rand(3), torch.rand(3), torch.tensor(0.001))
    fused = [private.fma in targets or torch.ops.prims.fma.default in targets]
    assert fused == [any(node.target is torch.ops.prims.fma.default for node in ours.graph.nodes)], targets


def test_a_wrapper_subclass_is_taken_apart_before_the_graph_is_seen() -> None:
    """optim/encoded_tensor.py relies on: make_wrapper_subclass, no __torch_function__, inner tensors as graph inputs."""
    from fp8compile.optim import EncodedTensor

    seen = []

    class Look(private.CustomGraphPass):  # type: ignore[misc]
        def uuid(self) -> None:
            return None

        def __call__(self, graph):  # type: ignore[no-untyped-def]
            seen.extend(node.meta["val"].dtype for node in graph.find_nodes(op="placeholder"))

    def backend(gm, inputs):  # type: ignore[no-untyped-def]
        return private.compile_fx(gm, inputs, config_patches={"joint_custom_post_pass": Look()})

    state = EncodedTensor.of(torch.rand(2, 128), "int8", True)
    result = torch.compile(lambda t: t * 2, backend=backend, fullgraph=True)(state)
    assert seen == [torch.int8, torch.float32] and type(result) is torch.Tensor
    assert private.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


def test_autograd_nodes_know_the_dtype_of_their_gradients() -> None:
    node = (torch.ones(2, dtype=torch.float16, requires_grad=True) * 2).grad_fn
    assert [each.dtype for each in private.gradients_into(node)] == [torch.float16]


def test_gradients_are_unscaled_and_checked_in_place() -> None:
    found, half = torch.zeros(()), torch.tensor(0.5)
    gradient = torch.tensor([4.0, -6.0], dtype=torch.float16)
    private.unscale_and_check_([gradient], found, half)
    assert gradient.tolist() == [2.0, -3.0] and found == 0
    private.unscale_and_check_([torch.tensor([torch.inf])], found, half)
    assert found == 1


def test_a_graph_is_compiled_once_more_in_the_context_it_was_traced_in() -> None:
    kept: list[object] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        kept.append(private.TracingContext.try_get())
        return gm

    torch.compile(lambda x: x.sin() * 2, backend=backend)(torch.ones(3))
    (context,) = kept
    with private.tracing(context):  # type: ignore[arg-type]
        assert private.TracingContext.try_get() is context is not None


def test_the_node_of_a_compiled_backward_is_found_and_no_earlier_one() -> None:
    first, second = (torch.compile(lambda x: x.sin() * 2, backend="aot_eager") for _ in range(2))
    x = torch.ones(3, requires_grad=True)
    middle = first(x)
    assert type(private.compiled_backward(middle, [])).__name__ == "CompiledFunctionBackward"
    before = private.producers(middle)
    assert private.compiled_backward(middle.view(3, 1), before) is None
    end = second(middle)  # kept: a node of torch 2.11 knows no other once its result is gone
    after = private.compiled_backward(end, before)
    assert after is not None and after is not before[0]
    assert after.next_functions[0][0] is before[0] and before[0].next_functions[0][0].variable is x


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


def test_a_real_tensor_is_read_under_a_fake_mode() -> None:
    real = torch.tensor([1.0, 3.0])
    with torch._subclasses.FakeTensorMode():
        with pytest.raises(AssertionError, match="FakeTensor"):
            real.max()
        with private.unset_fake_temporarily():
            assert float(real.max()) == 3


def test_an_empty_fake_tensor_is_what_an_operation_gives() -> None:
    with FakeTensorMode() as mode:
        given = torch.empty(2, 3, dtype=torch.bfloat16).t().abs()
    made = private.fake_empty(mode, given.shape, given.stride(), given.dtype, given.device)
    assert private.is_plain_fake(made) and made.fake_mode is mode  # type: ignore[attr-defined]
    assert (made.shape, made.stride(), made.dtype, made.device) == (
        (3, 2),
        (1, 3),
        torch.bfloat16,
        torch.device("cpu"),
    )


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
