"""Sharded parameters (DTensor, as fully_shard makes them): what is on this rank, and states sharded alike.

    state of p   [rows, ...], metadata [rows, groups]:  both cut along dim 0 as p is

A rank owns rows, and rows own whole groups (numerics/states). So a rank encodes its part as if it were the whole tensor, and
three ranks can load what two have saved. Where a shard would cut groups, the states stay in FP32. This depends on how a
parameter is sharded, never on the number of ranks: a state must be stored the same way on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8compile import _torch as private
from fp8compile.numerics.states.channels_last import is_channels_last

NOT_BY_ROWS = ("rank1_linear4",)  # one amax per column, of all rows


def is_sharded(p: Tensor) -> bool:
    return isinstance(p, DTensor)


def is_cut(p: Tensor) -> bool:
    """Whether no rank has all of ``p``."""
    return isinstance(p, DTensor) and any(
        size > 1 and not place.is_replicate() for place, size in zip(p.placements, p.device_mesh.shape, strict=True)
    )


def why_not_encoded(p: Tensor, formats: Sequence[str] = ()) -> str | None:
    """Why the shards of ``p`` do not own whole groups, or not in one of these formats; None where they do."""
    dims = _sharded_dims(p)
    if not dims:
        return None
    if dims != {0}:
        return f"sharded along dim {max(dims)}: only along dim 0 a shard owns whole groups"
    if p.dim() < 2:
        return "one dimension, sharded: a shard would cut its groups"
    shared = [each for each in formats if each in NOT_BY_ROWS]
    return f"sharded, and {shared[0]} has metadata that all rows share" if shared else None


def _sharded_dims(p: Tensor) -> set[int]:
    # Shard, or _StridedShard: fully_shard makes that of a parameter that tensor parallelism has already cut along dim 0
    return {place.dim for place in p.placements if hasattr(place, "dim")} if isinstance(p, DTensor) else set()


def lies_by_channels(p: Tensor) -> bool:
    """Whether a parameter is channels_last, and states follow its memory; the shards of one are contiguous."""
    return not is_sharded(p) and is_channels_last(p)


def local_part(t: Tensor) -> Tensor:
    """The part of a tensor that is on this rank; a plain tensor is all here."""
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def local_grad(p: Tensor) -> Tensor:
    """This rank's part of the gradient."""
    assert p.grad is not None
    return local_part(p.grad)


def complete_grad(p: Tensor) -> None:
    """Give the gradient the placements of ``p``. One that is not summed over ranks yet (Partial) is summed; a collective."""
    if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        p.grad = p.grad.redistribute(p.device_mesh, p.placements)


def first_element(p: Tensor) -> int:
    """The number of this rank's first element. A rank numbers its elements from there; no two of a tensor share a number.

    In a shard along dim 0 an element has the number that it has in the whole tensor, in contiguous order. Shards along other
    dimensions have ranges of their own.
    """
    if not isinstance(p, DTensor) or p.dim() == 0:
        return 0
    size, offset = private.local_shape_and_offset(p.shape, p.device_mesh, p.placements)
    columns = (start * stride for start, stride in zip(offset[1:], _contiguous_stride(p.shape)[1:], strict=True))
    return int(offset[0] * math.prod(size[1:]) + sum(columns) * p.numel())


def shard_like(p: Tensor, part: Tensor) -> Tensor:
    """This rank's piece of a state's part, contiguous, as the local tensor of a DTensor that is sharded as ``p`` is."""
    part = part.contiguous()  # codes may come as a view of padded groups, whose memory would be kept
    if not isinstance(p, DTensor):
        return part
    shape = p.shape
    if part.shape != local_part(p).shape:  # metadata, or codes two to a byte: cut along dim 0 or not at all
        shape = torch.Size((p.shape[0], *part.shape[1:])) if _sharded_dims(p) else part.shape
    stride = _contiguous_stride(shape)
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def largest_of(p: Tensor) -> Tensor:
    """The largest magnitude of the whole of ``p``, FP32, 0-d, inf for NaN; a collective where ranks have parts of it."""
    mine = local_part(p)
    found = mine.abs().amax().float() if mine.numel() else torch.zeros((), device=mine.device)
    found = torch.where(found < torch.inf, found, torch.inf)  # the larger of a NaN and a number may be either
    if isinstance(p, DTensor):
        for dim in range(p.device_mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=p.device_mesh.get_group(dim))
    return found


def here(p: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of ``whole``, a state of ``p``: sharded as ``p`` is, or the whole tensor on every rank."""
    if isinstance(whole, DTensor) or not isinstance(p, DTensor):
        return local_part(whole)
    size, offset = private.local_shape_and_offset(whole.shape, p.device_mesh, p.placements)
    return whole.detach()[tuple(slice(start, start + n) for start, n in zip(offset, size, strict=True))]


def why_not_here(p: Tensor, whole: Tensor) -> str | None:
    """Why this rank's part of a state cannot be found, None where it can: the state is sharded in another way than ``p``."""
    if not isinstance(whole, DTensor):
        return None
    if isinstance(p, DTensor) and (p.device_mesh, p.placements) == (whole.device_mesh, whole.placements):
        return None
    return (
        f"sharded as {whole.placements}, the parameter {p.placements if isinstance(p, DTensor) else 'not at all'}: load "
        "it through torch.distributed.checkpoint, which cuts it anew, or give its full_tensor()"
    )


def viewed(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory read as another dtype of the same size."""
    if not isinstance(t, DTensor):
        return t.view(dtype)
    seen = t.to_local().view(dtype)
    return DTensor.from_local(seen, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def sum_over_ranks(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the ranks of a group (None: all), in place; unchanged where torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(numbers, dist.ReduceOp.SUM, group=group)
    return numbers
