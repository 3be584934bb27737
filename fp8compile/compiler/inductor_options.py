"""Options of Inductor: those of the user's mode and recipe, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8compile import _torch as private
from fp8compile._messages import nearest
from fp8compile.recipe.recipe import Recipe

# Inductor stores a value that several kernels read once computing it takes more operations or reads than these, and makes
# no kernel that sums along rows and across them from more buffers than the last. Its limits (30, 4, 8, 10) leave no room for
# decodes, each of which reads twice where one read was before: a norm's backward would write what it decoded to memory, in
# FP32, and read it in two kernels. A scale is a hundredth of its codes. (Options that this torch does not have are left out.)
FUSION = private.known_options(
    {
        "realize_opcount_threshold": 50,
        "realize_reads_threshold": 8,
        "realize_acc_reads_threshold": 12,
        "triton.mix_order_reduction_max_reads": 20,
    }
)

# Inductor keeps a buffer that is no longer read for a later one of its size, as long as its estimate of the peak does not
# rise. That counts what a kernel decodes and never stores, and is twice the peak of a backward that decodes: buffers then
# wait through layers. Without, an allocator hands out their memory between (a Llama of 3 layers on a CPU: 22.7 -> 16.0 MB
# allocated at the peak, and no slower; of 6 layers, lowered for an H100: 103.1 -> 98.4 MB).
FREED = private.known_options({"allow_buffer_reuse": False})

# Where codes go to the host, the order of the graph is the schedule of their copies. Inductor's search for an order with a
# lower peak would wait for each copy as soon as it has begun, since memory is free behind the wait.
IN_ORDER = private.known_options({"reorder_for_peak_memory": False})

# Configurations with a smaller block are compiled in the parent process, all others in workers. Where the parent cannot be
# given the workers' ptxas, there are none.
IN_WORKERS = private.known_options({"dynamic_scale_rblock": False}) if private.set_triton_ptxas_path is None else {}


def our_options(recipe: Recipe) -> dict[str, Any]:
    """Inductor's options for a recipe's sake; options of the user's mode and recipe come behind."""
    rewriting = {**FUSION, **FREED, **IN_WORKERS} if recipe.rewrites_graph else {}
    return {**rewriting, **(IN_ORDER if recipe.offloads else {})}


def makes_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Whether Inductor makes CUDA graphs under these options, on a device that has them."""
    return bool(options.get("triton.cudagraphs", private.inductor_config.triton.cudagraphs))


def mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    known = private.list_mode_options()
    if mode not in known:
        raise ValueError(f"fp8compile has no mode {mode!r}.{nearest(mode, known)}")
    return dict(known[mode])


def inductor_options(recipe: Recipe) -> dict[str, Any]:
    known = private.inductor_config.get_config_copy()
    for name in recipe.debug.inductor:
        if name not in known:
            raise ValueError(f"Inductor has no option {name!r}.{nearest(name, known, listed=False)}")
    return dict(recipe.debug.inductor)
