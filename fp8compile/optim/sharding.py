"""Sharded parameters (DTensor: FSDP2, DDP's replicas): the part that is here, and states sharded alike.

A rank owns rows, and rows own whole groups (see numerics/grouping.py), so a rank encodes its part as if it were the whole,
and metadata ``[rows, groups]`` is sharded along the rows as the parameter is. Anything else keeps its states whole.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def is_sharded(p: Tensor) -> bool:
    return isinstance(p, DTensor)


def local(t: Tensor) -> Tensor:
    """The part of a tensor that is on this rank; a plain tensor is all here."""
    return t.to_local() if isinstance(t, DTensor) else t.detach()


def why_not_encoded(p: Tensor) -> str | None:
    """Why the shards of ``p`` do not own whole groups of it."""
    if not isinstance(p, DTensor):
        return None
    if not all(isinstance(place, Replicate) or place == Shard(0) for place in p.placements):
        return f"sharded as {p.placements}: only along dim 0 a shard owns whole groups"
    return "one dimension, sharded: a shard would cut its groups" if p.dim() < 2 and _cut(p) else None


def _cut(p: DTensor) -> bool:
    return any(place == Shard(0) for place in p.placements)


def first_element(p: Tensor) -> int:
    """The index, in contiguous order of the whole tensor, of the first element here."""
    if not isinstance(p, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    row = p.numel() // p.shape[0] if p.dim() and p.shape[0] else 0
    return cast(int, offset[0] * row) if offset else 0


def like(p: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A part of a state, this rank's of a tensor of ``shape``, distributed as ``p`` is."""
    if not isinstance(p, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def part_shape(p: Tensor, part: Tensor) -> tuple[int, ...]:
    """The shape of the whole of a state's part: the parameter's rows, and what one row has of it here."""
    if not isinstance(p, DTensor) or part.dim() == 0:
        return tuple(part.shape)
    return (p.shape[0], *part.shape[1:])


def distributed(p: Tensor, value: Tensor) -> Tensor:
    """This rank's part of a whole state tensor, for a state dict that was saved from one process."""
    if not isinstance(p, DTensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    here = local(p)
    start = first_element(p) // max(1, p.numel() // p.shape[0])
    return like(p, value[start : start + here.shape[0]].contiguous(), tuple(value.shape))
