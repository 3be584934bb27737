"""Every private torch API this project leans on, in one place; ``tests/test_canary.py`` says which one moved."""

from __future__ import annotations

from operator import getitem

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging._internal import trace_log, trace_structured
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.utils._pytree import tree_map_only

disabled_torch_function = torch._C._disabled_torch_function_impl
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "GraphTransformObserver",
    "OptimizedModule",
    "cache_dir",
    "compile_fx",
    "compile_fx_inner",
    "counters",
    "detect_fake_mode",
    "disabled_torch_function",
    "dynamo_config",
    "functorch_config",
    "getitem",
    "inductor_config",
    "innermost_backend",
    "list_mode_options",
    "make_fx",
    "make_wrapper_subclass",
    "min_cut_rematerialization_partition",
    "select_decomp_table",
    "trace_log",
    "trace_structured",
    "tree_map_only",
]
