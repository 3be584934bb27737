"""Numbers drawn in a graph that runs node by node: a pure function of their seed, as they are in a generated kernel.

A dropout's mask is often not kept: the backward draws it again from the seed, which is kept. Inductor's operation does so in
the kernels that it generates. Run by itself, it takes the next numbers of the generator, which makes another mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8compile import _torch as private


def draw_from_seeds(gm: GraphModule, generates: bool = False) -> None:
    """Make the random operations of a graph functions of their seeds, in place.

    They are operators of their own. With ``generates`` seeds are too, so that code generated from a graph draws the
    numbers that the graph draws node by node: generated seeds may be negative, and others.
    """
    drawn: dict[Any, Any] = {
        private.inductor_random: random_from_seed._opoverload,
        private.inductor_randint: randint_from_seed._opoverload,
    }
    if generates:
        drawn[torch.ops.prims.inductor_seeds.default] = drawn_seeds._opoverload
    found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in drawn]
    for node in found:
        node.target = drawn[node.target]
    if found:
        gm.recompile()


@torch.library.custom_op("fp8compile::drawn_seeds", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn_seeds(count: int, device: torch.device) -> Tensor:
    """What Inductor's operation gives node by node."""
    seeds: Tensor = torch.ops.prims.inductor_seeds(count, device)
    return seeds


@drawn_seeds.register_fake
def _(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, device=device, dtype=torch.int64)


@torch.library.custom_op("fp8compile::random_from_seed", mutates_args=())
def random_from_seed(
    size: Sequence[int], seed: Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> Tensor:
    """What ``torch.rand`` or ``torch.randn``, as ``mode`` says, draws from a seed."""
    drawn: Tensor = getattr(torch, mode)(size, device=seed.device, dtype=torch.float32, generator=_generator(seed))
    return drawn


@torch.library.custom_op("fp8compile::randint_from_seed", mutates_args=())
def randint_from_seed(low: int, high: int, size: Sequence[int], seed: Tensor) -> Tensor:
    """Whole numbers from ``low`` to below ``high``, drawn from a seed."""
    return torch.randint(low, high, size, device=seed.device, generator=_generator(seed))


@random_from_seed.register_fake
def _(size: Sequence[int], seed: Tensor, mode: str, *, align_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.float32)


@randint_from_seed.register_fake
def _(low: int, high: int, size: Sequence[int], seed: Tensor) -> Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.int64)


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))
