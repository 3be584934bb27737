"""Canaries of what fp8compile/_torch.py needs of Inductor's scheduler: its settings, and what it asks before it fuses."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile._version import release_of
from fp8compile.compiler.inductor_options import FREED, FUSION
from tests.support.fusion import compiled_asking


def sum_along_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (y := x.sum(-1)), y.relu() + 1


def test_every_setting_of_fusion_exists_and_an_unknown_one_is_left_out() -> None:
    newer = {"triton.mix_order_reduction_max_reads"} if release_of(torch.__version__) >= (2, 12) else set()
    older = {"realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"}
    assert set(FUSION) == older | newer
    assert set(FREED) == {"allow_buffer_reuse"}
    assert private.known_options({"no_such_option": 1, "triton.no_such_option": 1}) == {}


def test_the_scheduler_says_what_each_kernel_moves_after_fusion() -> None:
    seen = list[tuple[Any, ...]]()

    def after(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            origins = {origin.op for part in node.get_nodes() for origin in part.node.get_origins()}
            sizes = node.get_read_buffer_sizes(), node.get_write_buffer_sizes(), node.get_read_write_buffers_sizes()
            seen.append((*sizes, node.is_extern(), node.is_template(), origins))
        return nodes

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1

    with private.inductor_config.patch(_post_fusion_custom_pass=after, force_disable_caches=True):
        torch.compile(f)(torch.randn(64, 48))
    size = 64 * 48 * 4
    assert seen == [(size, size, 2 * size, False, False, {"call_function"})]


def test_the_scheduler_asks_what_may_be_one_kernel_and_says_what_it_would_hold() -> None:
    virtualized, asked = private.inductor_virtualized, list[tuple[Any, ...]]()

    def allowed(scheduler: Any, first: Any, second: Any) -> bool:
        (write,), (read,) = second.read_writes.writes, first.read_writes.reads
        steps = virtualized.graph.sizevars.stride_vars(write.index, write.var_names)
        known = {node.get_name() for node in (first, second)} <= set(scheduler.name_to_node)
        leq = virtualized.graph.sizevars.statically_known_leq(steps[-1], 1024)
        dtype = virtualized.graph.get_dtype(write.name)
        cpu = first.get_device().type
        mixed = private.MixOrderReduction.can_fuse(first, second)
        asked.append((isinstance(write, private.MemoryDep), steps[-1], known, leq, dtype, cpu, mixed))
        assert [math.prod(read.size), *map(math.prod, first.get_ranges())] == [64 * 48, 64, 48], (
            "a reduction's numbers of results and terms"
        )
        return True

    compiled_asking(allowed, sum_along_rows, torch.randn(64, 48))
    assert asked[0] == (True, 1, True, True, torch.float32, "cpu", False)


def test_inductor_takes_a_lowering_of_ours_and_writes_an_instruction() -> None:
    """fx/near_lowerings.py: what a GPU's short forms of functions are written with."""
    from torch._inductor.ops_handler import OpsHandler

    lowering = private.inductor_lowering
    assert "type_promotion_kind" in inspect.signature(lowering.register_lowering).parameters
    assert {"asm", "constraints", "dtype"} <= set(inspect.signature(OpsHandler.inline_asm_elementwise).parameters)
    assert callable(lowering.make_pointwise) and callable(lowering.broadcast_tensors)
    assert torch.ops.aten.log2.default in lowering.lowerings


def test_inductor_asks_whether_a_kernel_holds_its_rows() -> None:
    """compiler/group_kernels.py: by this name, with the kernel's features and whether programs share a row."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures

    asked = inspect.signature(InductorChoices.should_use_persistent_reduction).parameters
    assert list(asked) == ["features", "cooperative_reduction"]
    assert callable(SIMDKernelFeatures.reduction_nodes)
    assert "reduction_numel" in inspect.signature(SIMDKernelFeatures.__init__).parameters


def test_inductor_takes_one_choice_of_blocks_for_a_kernel() -> None:
    """compiler/code_kernels.py: asked with the kernel's features and sizes by axis, it is written into the kernel's text."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.runtime import triton_heuristics
    from torch._inductor.sizevars import SizeVarAllocator

    asked = inspect.signature(InductorChoices.triton_kernel_kwargs).parameters
    assert list(asked) == ["self", "kernel_cls", "features", "groups", "kernel_kwargs"]
    assert "fixed_config" in inspect.signature(TritonKernel.__init__).parameters
    assert callable(triton_heuristics.fixed_config) and callable(SizeVarAllocator.statically_known_geq)
    assert callable(SIMDKernelFeatures.is_reduction) and callable(SIMDKernelFeatures.scheduler_nodes)
    blocks = {"XBLOCK": 32, "YBLOCK": 32, "num_warps": 4, "num_stages": 1}
    assert private.FixedTritonConfig(blocks).config == blocks


def test_the_scheduler_says_what_made_each_buffer_that_a_kernel_waits_for() -> None:
    seen = set[str]()

    def allowed(scheduler: Any, first: Any, second: Any) -> bool:
        for node in (first, second):
            for dep in node.unmet_dependencies:
                made = scheduler.name_to_buf[dep.name].defining_op
                seen.add(type(made).__name__)
                assert made.get_name() in node.ancestors
        return False

    compiled_asking(allowed, sum_along_rows, torch.randn(64, 48))
    assert seen == {"SchedulerNode"}
