"""In which blocks kernels of codes are compiled: one choice each, where Inductor's tuner takes up to six. Changes no numbers.

Each choice of the tuner is compiled and timed in the first step. For kernels of codes the model of kernels
(benchmarks/harness/kernel_time.py) picks the same one again and again, over layers of Llama and ViT lowered for an H100:

    groups of 128    8 rows, 2 warps: within 10 % of the fastest choice; 1 row is up to 2.8 times slower, 32 up to 1.5 times
    tiles            32 x 32, 4 warps: the fastest, but for a norm's codes in both layouts (a third behind 16 x 256).
                     An H200's tuner took it for most; Inductor takes it, untimed, for a transpose of one tensor.
    in one order     1024, 4 warps: the fastest throughout

All others, and all under ``max_autotune``, are Inductor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile.compiler.group_kernels import holds_a_group
from fp8compile.compiler.row_kernels import CODES
from fp8compile.fx.inductor_choices import choosing

STORED = (*CODES, torch.int8)
_BLOCKS: Mapping[tuple[Any, ...], Mapping[str, int]] = {  # whether it reduces, and its axes
    (True, "x"): {"XBLOCK": 8},
    (False, "y", "x"): {"XBLOCK": 32, "YBLOCK": 32},
    (False, "x"): {"XBLOCK": 1024},
}


def with_known_blocks(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor that compiles a kernel of codes in one choice of blocks."""
    return choosing("triton_kernel_kwargs", _known)(inner_compile)


def _known(
    theirs: Callable[..., dict[str, Any]], kernel: Any, features: Any, sizes: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    kwargs = theirs(kernel, features, sizes, kwargs)
    settings = private.inductor_config
    is_tuned = settings.max_autotune or settings.max_autotune_pointwise
    is_decided = kwargs.get("fixed_config") or kwargs.get("mix_order_reduction")
    blocks = None if is_tuned or is_decided else _blocks_of(features, sizes[0])
    if blocks is None:
        return kwargs
    warps = 2 if features.is_reduction() else 4
    return {**kwargs, "fixed_config": private.FixedTritonConfig({**blocks, "num_warps": warps, "num_stages": 1})}


def _blocks_of(features: Any, tiling: Mapping[str, Any]) -> Mapping[str, int] | None:
    """The blocks of a kernel, or None: not a kernel of codes, or one that is shorter than its block or of unknown length."""
    reduces = features.is_reduction()
    is_ours = holds_a_group(features) if reduces else _stores_codes(features)
    blocks = _BLOCKS.get((reduces, *(axis for axis in tiling if not axis.startswith("r")))) if is_ours else None
    at_least = private.inductor_virtualized.graph.sizevars.statically_known_geq
    fits = blocks is not None and all(at_least(tiling[name[0].lower()], size) for name, size in blocks.items())
    return blocks if fits else None


def _stores_codes(features: Any) -> bool:
    dtype = private.inductor_virtualized.graph.get_dtype
    writes = (dep for node in features.scheduler_nodes() for dep in node.read_writes.writes)
    return any(dtype(dep.name) in STORED for dep in writes)
