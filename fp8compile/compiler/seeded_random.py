"""Numbers drawn in a graph that runs node by node: a pure function of their seed, as they are in a generated kernel.

A dropout's mask is often not kept: the backward draws it again from the seed, which is kept. Inductor's operation does so in
the kernels that it generates. Run by itself, it takes the next numbers of the generator, which makes another mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8compile import _torch as private


def draw_from_seeds(gm: GraphModule) -> None:
    """Make the random operations of a graph functions of their seeds, in place."""
    drawn = {private.inductor_random: _random, private.inductor_randint: _randint}
    found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in drawn]
    for node in found:
        node.target = drawn[node.target]
    if found:
        gm.recompile()


def _random(size: Sequence[int], seed: Tensor, mode: str, *, align_dtype: torch.dtype | None = None) -> Tensor:
    drawn: Tensor = getattr(torch, mode)(size, device=seed.device, dtype=torch.float32, generator=_generator(seed))
    return drawn


def _randint(low: int, high: int, size: Sequence[int], seed: Tensor) -> Tensor:
    return torch.randint(low, high, size, device=seed.device, generator=_generator(seed))


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))
