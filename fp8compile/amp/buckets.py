"""Gradients in few launches, whatever their number: all that a device and a dtype have in common, as one flat tensor.

    flat <- cat(gradients)  ->  count  ->  clip  ->  divide by the loss scale  ->  gradients <- flat

    large      elements outside [-edge, edge], inf, NaN            of gradients that a histogram looks at
    vanished   elements that were not 0 and whose quotient is      of FP16 gradients that stay FP16

So an update launches some kernels for each bucket and none for each parameter. A bucket has at most ``CHUNK`` elements, or
one gradient that has more. Its flat copy is all the memory that this takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8compile._distributed import local_part
from fp8compile._torch import unscale_and_check_
from fp8compile.amp.gradients import Gradient
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import EDGE, beyond

CHUNK = 2**26  # elements
COUNTED, NONFINITE, IGNORED = "counted", "non-finite", "ignored"  # small and large; inf and NaN alone; nothing


@dataclass(frozen=True)
class Bucket:
    """Gradients of one device and dtype, with one ``look``: ``COUNTED``, ``NONFINITE`` or ``IGNORED``."""

    gradients: list[Gradient]
    look: str

    @property
    def dtype(self) -> torch.dtype:
        return self.gradients[0].values.dtype

    @property
    def device(self) -> torch.device:
        return self.gradients[0].values.device

    @property
    def is_sparse(self) -> bool:
        """Whether there is a gradient in COO, which stays in its dtype: optimizers that take FP32 refuse it."""
        return any(each.p.grad is not None and each.p.grad.layout != torch.strided for each in self.gradients)

    def flat(self) -> Tensor:
        """All elements, copied; those of a gradient in the order in which they lie in memory."""
        return torch.cat([_as_it_lies(each.values, each.values).reshape(-1) for each in self.gradients])

    def put(self, flat: Tensor, targets: Sequence[Tensor]) -> None:
        """Write elements, in the order of ``flat``, into one target for each gradient."""
        own = [_as_it_lies(x, each.values) for x, each in zip(targets, self.gradients, strict=True)]
        parts = torch.split(flat, [each.numel() for each in own])
        torch._foreach_copy_(own, [part.view(each.shape) for each, part in zip(own, parts, strict=True)])


def _as_it_lies(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with its dimensions by the strides of ``like``, the largest first: a view, contiguous where like is dense."""
    return x if like.is_contiguous() else x.permute(sorted(range(x.dim()), key=like.stride, reverse=True))


def buckets_of(gradients: Sequence[Gradient], looks: Sequence[str]) -> Iterator[Bucket]:
    """Buckets that hold all gradients; ``looks``: one for each."""
    alike: dict[tuple[torch.device, torch.dtype, str], list[Gradient]] = defaultdict(list)
    for each, look in zip(gradients, looks, strict=True):
        alike[each.values.device, each.values.dtype, look].append(each)
    for (_, _, look), several in alike.items():
        chunk: list[Gradient] = []
        room = CHUNK
        for each in several:
            if chunk and each.values.numel() > room:
                yield Bucket(chunk, look)
                chunk, room = [], CHUNK
            chunk.append(each)
            room -= each.values.numel()
        yield Bucket(chunk, look)


@dataclass
class Division:
    """Divides gradients by the loss scale, bucket by bucket; tensors on the devices of the gradients.

    Args:
        scale: 0-d float32.
        clips: whether gradients are counted and clipped first, as the histogram mode does.
        wide: whether FP16 gradients become FP32: their optimizer takes them so.

    Attributes:
        counts: ``[3]`` int64 each: small, large, vanished.
        found: for each device 0-d float32, 1 where an inf or NaN was found.
    """

    scale: Tensor
    clips: bool
    wide: bool
    counts: list[Tensor] = field(default_factory=list)
    found: dict[torch.device, Tensor] = field(default_factory=dict)
    _inverse: dict[torch.device, Tensor] = field(default_factory=dict)

    def of(self, bucket: Bucket) -> None:
        if not self.clips and bucket.dtype != torch.float16:
            return self._divide([each.values for each in bucket.gradients])
        flat = bucket.flat()
        large = _count_large(flat, bucket.look) if self.clips else None
        if self.clips:
            clip_(flat)
        if bucket.dtype == torch.float16 and self.wide and not bucket.is_sparse:
            self._divide([flat := flat.float()])
            bucket.put(flat, [widened(each) for each in bucket.gradients])
            return self._count(bucket, large, None)
        before = torch.count_nonzero(flat) if bucket.dtype == torch.float16 else None
        self._divide([flat])
        bucket.put(flat, [each.values for each in bucket.gradients])
        self._count(bucket, large, None if before is None else before - torch.count_nonzero(flat))

    def found_on(self, device: torch.device) -> Tensor:
        """0-d float32: 1 if an inf or NaN was found on any device."""
        several = [each.to(device, non_blocking=True) for each in self.found.values()]
        return several[0] if len(several) == 1 else torch.stack(several).amax()

    def _divide(self, values: list[Tensor]) -> None:
        """By torch's own kernel, as torch.amp.GradScaler does."""
        device = values[0].device
        if device not in self.found:
            self.found[device] = torch.zeros((), dtype=torch.float32, device=device)
            self._inverse[device] = self.scale.double().reciprocal().float().to(device, non_blocking=True)
        unscale_and_check_(values, self.found[device], self._inverse[device])

    def _count(self, bucket: Bucket, large: Tensor | None, vanished: Tensor | None) -> None:
        if large is None and vanished is None:
            return
        numel = sum(each.values.numel() for each in bucket.gradients)
        small = numel - large if large is not None and bucket.look == COUNTED else None
        known = [each for each in (small, large, vanished) if each is not None]
        zeros = [torch.zeros((), dtype=torch.int64, device=bucket.device)] if len(known) < 3 else []
        three = (zeros[0] if each is None else each for each in (small, large, vanished))
        self.counts.append(torch.stack(list(three)))


def clip_(flat: Tensor) -> None:
    """Clip in place: FP16 to [-65504, 65504]. In other dtypes, whose range does not matter here, only an inf is clipped to
    +-65504: it was an FP16 number once. NaN stays."""
    if flat.dtype == torch.float16:
        flat.clamp_(-FP16_MAX, FP16_MAX)
    else:
        torch.nan_to_num_(flat, nan=torch.nan, posinf=FP16_MAX, neginf=-FP16_MAX)


def _count_large(flat: Tensor, look: str) -> Tensor | None:
    """How many elements are large, inf or NaN: 0-d int64. Beyond the largest finite value only inf and NaN are."""
    if look == IGNORED:
        return None
    edge = EDGE if look == COUNTED else torch.finfo(flat.dtype).max
    return torch.count_nonzero(beyond(flat, edge))


def widened(each: Gradient) -> Tensor:
    """A new FP32 gradient of an FP16 parameter, its elements on this rank; they are not set yet."""
    p = each.p
    assert p.grad is not None
    wide = torch.empty_like(p.grad, dtype=torch.float32)
    p.grad_dtype = None
    p.grad = wide
    return local_part(wide)
