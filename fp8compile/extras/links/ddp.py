"""DistributedDataParallel that averages gradients as FP8 codes: ``compress_gradients(ddp)``, one byte an element each way.

    each tensor's amax                     all_reduce, the largest over ranks: 4 bytes a tensor
    codes under the shared scale           all_to_all: a rank gets its part of the bucket from all others
    their mean, in FP32, rounded again     all_gather, under the same scale: a mean is no larger than the largest

One scale for all ranks makes codes numbers that can be added. So a part is summed without a look at where tensors end, and
what comes back is decoded once. Every rank decodes the same codes: gradients are bit-equal on all of them. Numbers change: an
element is rounded twice. ``numerics/gradient_scaling.py`` has the scale, and mu, which is adapted after each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fp8compile.numerics.formats import E4M3, E5M2, Format
from fp8compile.numerics.gradient_scaling import clipped_in, next_mu, shared_inv_scale
from fp8compile.numerics.scaling import quantize

ALL_GATHER: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # torch 2.11 has the older name alone
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


class GradientExchange:
    """What one model's hook remembers from step to step; ``state_dict`` goes into a checkpoint beside the optimizer's.

    Attributes:
        mu: 0-d FP32, the same on all ranks; on the device of the gradients from the first step on.
        bytes_sent: that this rank has sent to others: codes, and of each small all_reduce its own numbers once.
        bytes_plain: that a ring all_reduce of the gradients as they were would have sent.
    """

    def __init__(self, fmt: Format, group: dist.ProcessGroup | None) -> None:
        self.fmt, self.group = fmt, group
        self.mu = torch.ones((), dtype=torch.float32)
        self.bytes_sent = self.bytes_plain = 0
        self._counts: list[Tensor] = []
        self._elements = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mu": float(self.mu)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a mu below 1 or not finite."""
        mu = state.get("mu")
        if not isinstance(mu, (int, float)) or not 1 <= mu < float("inf"):
            raise ValueError(f"mu={mu!r}: a number from 1 on is needed, as state_dict() gave it")
        self.mu = torch.full_like(self.mu, float(mu))

    def average(self, bucket: Tensor, gradients: list[Tensor], last: bool) -> Tensor:
        """The bucket's mean over ranks, in place.

        Args:
            bucket: ``[n]``, of any float dtype.
            gradients: its tensors, views of it.
            last: whether it is the step's last one: mu is adapted then.
        """
        self.mu = self.mu.to(bucket.device)
        inv_scale = self._shared_scales(gradients)
        codes = torch.zeros(self._padded(bucket.numel()), dtype=torch.uint8, device=bucket.device)
        for part, g, scale in zip(_views(codes, gradients, bucket), gradients, inv_scale, strict=True):
            part.copy_(quantize(g.reshape(-1), scale, self.fmt).view(torch.uint8))
            self._counts.append(clipped_in(g, scale, self.fmt))
        self._elements += bucket.numel()
        mean = self._mean_of(codes)
        for part, g, scale in zip(_views(mean, gradients, bucket), gradients, inv_scale, strict=True):
            g.copy_((part.view(self.fmt.dtype).float() * scale).reshape(g.shape))
        self.bytes_plain += 2 * (self._ranks - 1) * bucket.numel() * bucket.element_size() // self._ranks
        if last:
            self._adapt()
        return bucket

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self.group)

    def _padded(self, numel: int) -> int:
        return -(-numel // self._ranks) * self._ranks

    def _shared_scales(self, gradients: list[Tensor]) -> Tensor:
        amax = torch.stack(
            [
                g.detach().abs().amax().float() if g.numel() else g.new_zeros((), dtype=torch.float32)
                for g in gradients
            ]
        )
        # NCCL's largest of a NaN and a number may be either: a count cannot be lost
        amax = torch.where(amax < torch.inf, amax, torch.inf)
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        self.bytes_sent += amax.nbytes
        return shared_inv_scale(amax, self.mu, self.fmt)

    def _mean_of(self, codes: Tensor) -> Tensor:
        """Codes of the mean over ranks of each element."""
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes, group=self.group)
        summed = received.view(self.fmt.dtype).view(self._ranks, -1).float().sum(0)
        mean = (summed / self._ranks).to(self.fmt.dtype).view(torch.uint8)
        ALL_GATHER(received, mean, group=self.group)
        self.bytes_sent += 2 * (self._ranks - 1) * mean.numel()
        return received

    def _adapt(self) -> None:
        found = torch.stack(
            [torch.stack(self._counts).sum().float(), torch.full_like(self.mu, float(self._elements))]
        )
        dist.all_reduce(found, group=self.group)
        self.bytes_sent += found.nbytes
        self.mu = next_mu(self.mu, *found.unbind())
        self._counts.clear()
        self._elements = 0


def compress_gradients(
    model: DistributedDataParallel, *, format: str = "e4m3", group: dist.ProcessGroup | None = None
) -> GradientExchange:
    """Average the gradients of a DDP model as FP8 codes from the next backward on.

    Each bucket is waited for where it is ready, so the exchange does not overlap with the backward's computations on a CPU;
    on a GPU the stream waits, not the host.

    Args:
        model: wrapped, before its first backward.
        format: "e4m3", or "e5m2" for gradients of more decades than 5.
        group: the ranks that average; None: the model's own.

    Raises:
        ValueError: no DDP model, no such format, a parameter whose gradient has no float dtype.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"compress_gradients takes a DistributedDataParallel, not a {type(model).__name__}")
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: one of {', '.join(FORMATS)} is needed")
    wrong = [name for name, p in model.named_parameters() if p.requires_grad and not p.is_floating_point()]
    if wrong:
        raise ValueError(
            f"{wrong[0]} is not of a real float dtype, which FP8 codes are made of: leave DDP's all_reduce"
        )
    exchange = GradientExchange(FORMATS[format], group or model.process_group)
    model.register_comm_hook(exchange, _hook)
    return exchange


def _hook(exchange: GradientExchange, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    with torch.no_grad():
        future.set_result(exchange.average(bucket.buffer(), bucket.gradients(), bucket.is_last()))
    return future


# DDP compares annotations with these objects, not with their names
_hook.__annotations__.update({"bucket": getattr(dist, "GradBucket", None), "return": torch.futures.Future[Tensor]})


def _views(flat: Tensor, gradients: list[Tensor], bucket: Tensor) -> list[Tensor]:
    """The parts of ``flat`` that lie where the gradients do in their bucket."""
    starts = [(g.data_ptr() - bucket.data_ptr()) // bucket.element_size() for g in gradients]
    return [flat[start : start + g.numel()] for start, g in zip(starts, gradients, strict=True)]
