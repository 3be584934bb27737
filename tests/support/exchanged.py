"""What ranks say of gradients that are averaged as FP8 codes; functions of a module, as ``ranks.on_ranks`` needs them.

Tensors travel as lists: torch would share their memory, and a rank may be gone before it is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8compile.extras.links.ddp import GradientExchange, compress_gradients
from fp8compile.numerics.formats import E4M3, E5M2


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 64), nn.GELU(), nn.Linear(64, 5)).to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 37, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def trained(steps: int, format: str | None, bucket_mb: float, dtype_name: str) -> dict[str, Any]:
    """The gradients of the last step, and what the exchange remembers; ``format`` None: DDP's own all_reduce."""
    dtype = getattr(torch, dtype_name)
    model = DistributedDataParallel(model_of(dtype), bucket_cap_mb=bucket_mb)
    exchange = compress_gradients(model, format=format) if format else None
    for step in range(steps):
        model.zero_grad()
        model(batch_of(dist.get_rank(), step, dtype)).square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = {"gradients": [g.tolist() for g in grads], "dtypes": {str(g.dtype) for g in grads}}
    if exchange is None:
        return found
    return {**found, "mu": float(exchange.mu), "sent": exchange.bytes_sent, "plain": exchange.bytes_plain}


def averaged(tensors: list[list[Any]], mu: float, format: str) -> dict[str, Any]:
    """Each rank's tensors averaged in one bucket: ``tensors`` by rank, as lists."""
    mine = [torch.tensor(t) for t in tensors[dist.get_rank()]]
    bucket = torch.cat([t.reshape(-1) for t in mine])
    parts = [part.view(t.shape) for part, t in zip(bucket.split([t.numel() for t in mine]), mine, strict=True)]
    exchange = GradientExchange(E4M3 if format == "e4m3" else E5M2, None)
    exchange.load_state_dict({"mu": mu})
    exchange.average(bucket, parts, last=True)
    return {"mean": [part.tolist() for part in parts], "mu": float(exchange.mu)}
