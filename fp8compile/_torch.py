"""Every private torch API this project leans on, in one place; ``tests/test_canary*.py`` say which one moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import getitem
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, ShortenTraceback, Unsupported, UserError
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, dynamo_timed
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import Guard, TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, PyCodeCache
from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep
from torch._inductor.inductor_prims import randint as inductor_randint
from torch._inductor.inductor_prims import random as inductor_random
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.runtime import compile_tasks
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V as inductor_virtualized
from torch._logging._internal import trace_log, trace_structured
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

NO_SINGLE_GRAPH = (Unsupported, UserError, FailOnRecompileLimitHit)  # what fullgraph=True raises
global_step_hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)  # of all optimizers
COLLECTIVES, RECOMPUTE, CHECKPOINT = "_c10d_functional", "recompute", "ac_graph_id"  # a key of meta: policy; region
collectives = getattr(torch.ops, COLLECTIVES)  # as they stand in graphs
inductor_lowering: Any = torch._inductor.lowering  # a form of one's own for an operator
set_triton_ptxas_path = getattr(compile_tasks, "_set_triton_ptxas_path", None)  # as in compile workers
current_backward = torch._C._current_graph_task_id  # a number of its own, in hooks of its nodes; -1 outside of any
version_preserved = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
cpu_has_vnni = torch.cpu._is_vnni_supported  # products of four INT8 pairs at once; of AVX512 alone (torch 2.15)
unscale_and_check_ = torch._amp_foreach_non_finite_check_and_unscale_  # (gradients, found_inf, inv_scale), in place


def gradients_into(node: Any) -> Sequence[Any]:
    """The metadata of the gradients that an autograd node takes: ``dtype`` and ``shape`` of each."""
    return node._input_metadata  # type: ignore[no-any-return]


def producers(values: Any) -> list[Any]:
    """The autograd nodes that tensors come from."""
    return [v.grad_fn for v in tree_leaves(values) if isinstance(v, Tensor) and v.grad_fn is not None]


def compiled_backward(values: Any, before: Sequence[Any]) -> Any:
    """The autograd node of the compiled graph that made ``values``; not searched behind ``before``. None if there is none."""
    waiting, seen = producers(values), list(before)
    while waiting:
        node = waiting.pop()
        if any(node is known for known in seen):
            continue
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
        seen.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return None


def ends_at_graph_break(gm: GraphModule) -> bool:
    """Whether a graph break follows this graph; True also where Dynamo did not make the graph, so that nothing is known."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is None or bool(reason.graph_break)


def add_guard(placeholder: Node, holds: Callable[[Any], bool], text: str) -> None:
    """Have Dynamo run the graph that it hands to the backend now only where ``holds`` of this input; else compile again.
    Does nothing where Dynamo does not know the input's source, or hands over no graph."""
    source, context = getattr(placeholder, "_dynamo_source", None), TracingContext.try_get()

    def guard_holds(builder: Any, guard: Guard) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

    if source is not None and context is not None:
        context.guards_context.dynamo_guards.add(Guard(source, guard_holds))


def group_size(name: str) -> int:
    """How many ranks a process group of this name has."""
    from torch.distributed.distributed_c10d import _get_group_size_by_name

    return _get_group_size_by_name(name)  # type: ignore[arg-type]


def unsharded_parameters(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The parameters that FSDP2 shards, each with the whole one that the model computes with, as far as that exists."""
    sharded = (p for p in fsdp_parameters(model) if getattr(p, "_unsharded_param", None) is not None)
    return [(p.sharded_param, p._unsharded_param) for p in sharded]


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps of each parameter that it shards; see ``_fsdp_param.py`` there."""
    states = (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    return [p for state in states for group in _parameter_groups(state) for p in group.fsdp_params]


def _parameter_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


# In the meta of a node whose value Inductor stores, rather than recompute it in each kernel that reads it.
STORED = "inductor_realize_to_strides"
# An input of the backward that is one of the forward's: how its name begins; where its meta says if it stays (torch 2.15).
INPUTS, STATIC_INPUT = "primals_", "is_static_input"
# In the "custom" meta of a node: what torch.autograd.graph.region_activation_memory_budget lets the partitioner keep there.
MEMORY_BUDGET = "_region_activation_memory_budget"
# Whether Dynamo compiles a module of torch.nn's compiled in place; whether kernels are as compiler/loop_loads.py says.
COMPILES_CONTAINERS = LOADS_IN_LOOPS = torch.__version__ >= "2.15"
# Whether a compilation can have a region of Dynamo's code caches to itself, with a recompile_limit of its own (torch 2.13).
HAS_REGIONS = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def region_of(context: Any) -> int:
    """The number of the region of Dynamo's code caches that a compilation uses; -1 is the one that all others share."""
    return int(getattr(context, "_isolate_recompiles_id", -1))


def use_region(context: Any, region: int) -> None:
    """Let a compilation find what was compiled in another region; it reads the number at each call."""
    if region != region_of(context):
        context._isolate_recompiles_id = region


def context_of(module: nn.Module) -> Any:
    """Dynamo's context of a compiled module: an attribute of what torch.compile returns, else in its closure."""
    if isinstance(module, OptimizedModule):
        return module.dynamo_ctx
    compiled = module._compiled_call_impl
    return inspect.getclosurevars(compiled).nonlocals.get("self") if inspect.isfunction(compiled) else None


def backend_name(module: nn.Module) -> str | None:
    """The name of the backend that a module itself is compiled with; None where torch.compile has not touched it."""
    callback = getattr(context_of(module), "callback", None)
    return getattr(innermost_backend(callback), "compiler_name", None) if callable(callback) else None


def frames_seen() -> frozenset[int]:
    """The identities of the code objects that Dynamo was given since its last reset, including those that it skipped."""
    return frozenset(input_codes.seen_ids)


def graphs_captured() -> int:
    """How many graphs Dynamo has given to backends of any kind."""
    return int(counters["stats"]["unique_graphs"])


def is_plain_fake(value: object) -> bool:
    """Whether a value of a graph is a fake tensor that stands for no tensor subclass: Python's class, or C++'s (torch 2.15),
    whose type is that of the tensor it stands for."""
    ask = getattr(fake_tensor, "is_fake_tensor", None) or getattr(torch._C, "_is_fake_tensor", None)
    stands_for_one = ask is not None and type(value) in (Tensor, torch.nn.Parameter) and bool(ask(value))
    return stands_for_one or type(value) is fake_tensor.FakeTensor


def fake_empty(
    mode: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A fake tensor with memory of its own, at a fifth of the cost of an operation under ``mode``."""
    with unset_fake_temporarily():
        return fake_tensor.FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def size_as_estimated(size: torch.SymInt, unknown: int) -> tuple[int, dict[str, int]]:
    """A symbolic size as a number, and the value assumed for each symbol that only a run knows: the largest that the graph
    allows (a mask selects at most all rows), or ``unknown`` where that is less. A value at compilation is kept."""
    expr, env = size.node.expr, size.node.shape_env
    seen = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    guessed = {s: int(min(env.var_to_range[s].upper, unknown)) for s in expr.free_symbols if s not in seen}
    known = {s: seen[s] for s in expr.free_symbols if s in seen}
    return int(expr.xreplace(known | guessed)), {str(s): n for s, n in guessed.items()}


def known_options(patches: dict[str, Any]) -> dict[str, Any]:
    """The Inductor settings among ``patches``, by dotted name, that this torch has."""
    return {name: value for name, value in patches.items() if name in inductor_config.get_config_copy()}


def transfers() -> Any:
    """torch's operators for copies to pinned host memory and back, on a stream of their own: ``offload``, ``reload`` and
    ``wait_tensor``. None where torch has none (before 2.12). Code from a cache calls them too, so they must be loaded."""
    try:
        from torch._functorch._activation_offloading import offload_ops  # noqa: F401
    except ImportError:
        return None
    return torch.ops.ao


def until_waited_for(kept: Any) -> tuple[Any, ...]:
    """What follows ``wait_tensor``'s first argument so that ``kept`` stays; from torch 2.13 on the second is emptied."""
    takes = [argument.name for argument in torch.ops.ao.wait_tensor.default._schema.arguments]
    return (None, kept) if "last_use_of_storage" in takes else (kept,)


class RefusedOptions(ShortenTraceback, ValueError):  # type: ignore[misc, unused-ignore]
    """A ValueError that Dynamo hands on as it is. Its traceback begins at ``frame``."""

    def __init__(self, message: str, frame: FrameType) -> None:
        super().__init__(message, first_useful_frame=frame)


__all__ = [  # what is imported for others; what is defined above is for them too
    "COLLECTIVES",
    "AsyncCompile",
    "BackendCompilerFailed",
    "ConstantSource",
    "CppCodeCache",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensorMode",
    "FixedTritonConfig",
    "ForwardTokenAOTInput",
    "GradAOTOutput",
    "GraphTransformObserver",
    "InputMutationAOTOutput",
    "LazyGraphModule",
    "MemoryDep",
    "MixOrderReduction",
    "OptimizedModule",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "PyCodeCache",
    "SubclassGetAttrAOTInput",
    "SubclassGetAttrAOTOutput",
    "TangentAOTInput",
    "TracingContext",
    "TritonKernel",
    "Unsupported",
    "ValueRanges",
    "bound_sympy",
    "cache_dir",
    "compile_fx",
    "compile_fx_inner",
    "counters",
    "detect_fake_mode",
    "dynamo_config",
    "dynamo_timed",
    "enable_python_dispatcher",
    "functorch_config",
    "get_proxy_mode",
    "getitem",
    "inductor_config",
    "inductor_randint",
    "inductor_random",
    "inductor_virtualized",
    "innermost_backend",
    "list_mode_options",
    "local_shape_and_offset",
    "make_fx",
    "min_cut_rematerialization_partition",
    "select_decomp_table",
    "stable_topological_sort",
    "trace_log",
    "trace_structured",
    "tracing",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
]
