"""One canary for each private torch API in fp8compile/_torch.py: says which one moved, and what we need of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile import _torch as private


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


def test_the_min_cut_saves_what_is_marked() -> None:
    """chunking.columns relies on: a value marked MUST_SAVE is saved, although what it is made of is there anyway."""
    from functorch.compile import aot_function
    from torch.utils.checkpoint import CheckpointPolicy

    kept: dict[bool, set[str]] = {}

    def partition(gm: torch.fx.GraphModule, inputs: object, marked: bool, **kwargs: object) -> object:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default) if marked else ():
            node.meta[private.RECOMPUTE] = CheckpointPolicy.MUST_SAVE
        halves = private.min_cut_rematerialization_partition(gm, inputs, **kwargs)  # type: ignore[arg-type]
        kept[marked] = {str(n.target) for n in halves[0].graph.output_node().all_input_nodes}
        return halves

    for marked in (False, True):
        y = torch.ones(4, 4, requires_grad=True)
        cut = lambda gm, inputs, marked=marked, **kw: partition(gm, inputs, marked, **kw)  # noqa: E731
        aot_function(lambda x, y: (x.sin() * y).sum(), lambda gm, _: gm, partition_fn=cut)(torch.ones(4, 4), y)
    assert "aten.sin.default" not in kept[False] and "aten.sin.default" in kept[True]


def test_a_matmul_of_16_bit_numbers_has_an_fp32_result_on_cuda() -> None:
    """numerics.chunks relies on it."""
    with FakeTensorMode(), torch.device("meta"):
        a, b = (torch.empty(16, 16, dtype=torch.bfloat16) for _ in range(2))
        assert torch.mm(a, b, out_dtype=torch.float32).dtype == torch.float32


def test_the_hooks_and_options_we_set_exist() -> None:
    hooks = ("joint_custom_post_pass", "post_grad_custom_post_pass", "custom_partitioner_fn")
    for option in (*hooks, "post_grad_fusion_options", "disabled_passes"):
        assert hasattr(private.inductor_config, option), option
    assert hasattr(private.functorch_config, "ban_recompute_materialized_backward")
    assert callable(private.functorch_config.save_config_portable)


def test_triton_kernels_are_handed_over_as_text_and_text_is_loaded_from_a_file() -> None:
    """optim.one_launch relies on both."""
    wanted = ["self", "kernel_name", "source_code", "device_str"]
    assert [*inspect.signature(private.AsyncCompile.triton).parameters] == wanted
    loaded = private.PyCodeCache.load("def found(): return 7")
    assert loaded.found() == 7 and "return 7" in inspect.getsource(loaded.found)


def test_a_text_of_cpp_is_compiled_with_our_flags_behind_inductors() -> None:
    """fx.cpu_codecs relies on it: Inductor's own flags switch vectors of loops off."""
    assert "extra_flags" in inspect.signature(private.CppCodeCache.load_async).parameters
    text = 'extern "C" int found() { return NUMBER; }'
    assert private.CppCodeCache.load(text, extra_flags=("-DNUMBER=6", "-UNUMBER", "-DNUMBER=7")).found() == 7


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


def test_each_backward_has_a_number_in_its_hooks() -> None:
    found = list[int]()
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        for y in (x.sin(), x.cos()):
            y.grad_fn.register_hook(lambda *_: found.append(private.current_backward()))  # type: ignore[union-attr]
            x = x + y
        x.sum().backward()
    assert private.current_backward() == -1 and -1 not in found
    assert found[0] == found[1] != found[2] == found[3]


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


def test_inductor_still_lowers_no_scales_of_blocks() -> None:
    """Why "blockwise" and "mxfp8" are emulated only. Where this fails, look whether a device can have them now.

    ``scaled_mm``'s lowering hands two matrices and two scales to ``torch._scaled_mm``, and does not say what kinds the scales
    are. It stops at scales that are swizzled, as those of MXFP8 must be.
    """
    from torch._inductor.kernel import mm

    if not hasattr(mm, "tuned_scaled_mm_v2") or torch.__version__ >= "2.14":
        pytest.skip("looked at in torch 2.13 alone: 2.11 has no such lowering")
    lowering = inspect.getsource(mm.tuned_scaled_mm_v2)
    assert "all(s == 0 for s in swizzle_a)" in lowering
    handed_on = lowering.split("kwarg_overrides[aten__fp8_mm.uid] = dict(")[1].split(")")[0]
    assert handed_on.split() == ["out_dtype=out_dtype,", "use_fast_accum=use_fast_accum"]


def test_a_cpu_tells_whether_it_has_vnni() -> None:
    assert private.cpu_has_vnni() is torch.cpu.get_capabilities().get("avx512_vnni", False)


def test_integer_products_are_no_recomputable_operation() -> None:
    """The min-cut repeats no matmul: ``_int_mm`` is in neither of its lists, and what is in none is not repeated."""
    from torch._functorch.partitioners import get_default_op_list

    lists = get_default_op_list()
    assert torch.ops.aten._int_mm not in lists.recomputable_ops
    assert torch.ops.aten.mul in lists.recomputable_ops


def test_what_is_traced_can_be_marked_while_it_is() -> None:
    """fx.traced_calls relies on: inside make_fx there is a mode, whose tracer has the graph as far as it is."""
    assert private.get_proxy_mode() is None
    seen: list[int] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        seen.append(len(private.get_proxy_mode().tracer.graph.nodes))  # type: ignore[union-attr]
        return y * 2

    graph = private.make_fx(traced)(torch.ones(2)).graph
    assert seen == [2] and len(graph.nodes) == 4, "the input and the sum, at that time"


def test_a_backward_can_be_lowered_at_once() -> None:
    """For the dump of a graph whose code came from a cache."""
    assert private.functorch_config.force_non_lazy_backward_lowering is False


def test_workers_tell_triton_which_ptxas_to_use() -> None:
    assert private.set_triton_ptxas_path is not None, "dynamically scaled configurations are then turned off"
    assert not inspect.signature(private.set_triton_ptxas_path).parameters
    assert "TRITON_PTXAS_PATH" in inspect.getsource(private.set_triton_ptxas_path)
    assert private.known_options({"dynamic_scale_rblock": False})
