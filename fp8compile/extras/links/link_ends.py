"""One end of a link between pipeline stages: what a tensor is as bytes, and what is remembered of it.

``ChangesEnd`` sends changes of samples (``numerics/message_changes.py``), ``DirectEnd`` each tensor for itself. Both ends of
a link are of one kind. A sender reads its own bytes as the receiver does, so that both remember the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.extras.links.sample_messages import SampleMessages
from fp8compile.numerics.message_changes import change, checksum, moved, started
from fp8compile.numerics.wire_codes import WireCode, sixteen

CHECK_BYTES = 8


class DirectEnd:
    """A link without a memory: gradients, and activations coded directly."""

    def __init__(self, code: WireCode) -> None:
        self.code = code

    def nbytes(self, like: Tensor, ids: Sequence[int] | None) -> int:
        return self.code.nbytes(like.shape, like.dtype)

    def encode(self, x: Tensor, ids: Sequence[int] | None) -> Tensor:
        """uint8 ``[nbytes]``."""
        return self.code.packed(x)

    def decode(self, wire: Tensor, like: Tensor, ids: Sequence[int] | None) -> Tensor:
        """In the shape and dtype of ``like``."""
        return self.code.unpacked(wire, like.shape, like.dtype, like.dtype)


class ChangesEnd:
    """A link that remembers samples: those of a first visit come first in a message, then changes, then the checksum.

    Attributes:
        code: of changes.
        first: of activations of samples that are new.
        check: whether messages end with a checksum of both ends' memory.
        kept: the messages.
    """

    def __init__(self, code: WireCode, first: WireCode, check: bool) -> None:
        self.code, self.first, self.check = code, first, check
        self.kept = SampleMessages()

    def nbytes(self, like: Tensor, ids: Sequence[int] | None) -> int:
        """Of a message of activations ``[samples, ...]`` like these. ``ids`` None: samples that are not remembered.

        Raises:
            ValueError: samples had another shape or dtype before.
        """
        if ids is None:
            return self.first.nbytes(like.shape, like.dtype)
        self.kept.check(like.shape[1:], like.dtype)
        new, known = self.kept.parts(ids)
        return _nbytes(self.first, new, like) + _nbytes(self.code, known, like) + CHECK_BYTES * self.check

    def encode(self, x: Tensor, ids: Sequence[int] | None) -> Tensor:
        """uint8 ``[nbytes]``; the memory moves with it.

        Raises:
            ValueError: samples had another shape or dtype before.
        """
        if ids is None:
            return self.first.packed(x)
        self.kept.check(x.shape[1:], x.dtype)
        new, known = self.kept.parts(ids)
        parts = [self.first.packed(x[new])] if new else []
        if known:
            m = self.kept.read([ids[i] for i in known], x.device)
            parts.append(self.code.packed(change(x[known], m)))
        wire = torch.cat(parts)
        self._take(wire, x, ids)
        return torch.cat([wire, self._checksum(ids, x.device).view(torch.uint8)]) if self.check else wire

    def decode(self, wire: Tensor, like: Tensor, ids: Sequence[int] | None) -> Tensor:
        """In the shape and dtype of ``like``; the memory moves with it.

        Raises:
            RuntimeError: the checksum is not the sender's.
        """
        if ids is None:
            return self.first.unpacked(wire, like.shape, like.dtype, like.dtype)
        received = self._take(wire, like, ids)
        if self.check and not torch.equal(wire[-CHECK_BYTES:], self._checksum(ids, like.device).view(torch.uint8)):
            raise RuntimeError(
                f"the two ends of a link remember different things of the samples {[*ids]}: give both the same samples(ids) "
                "before each step, and states that were saved after the same step"
            )
        return received

    def _take(self, wire: Tensor, like: Tensor, ids: Sequence[int]) -> Tensor:
        """What the receiver computes with."""
        new, known = self.kept.parts(ids)
        head, received = _nbytes(self.first, new, like), torch.empty_like(like, memory_format=torch.contiguous_format)
        changes = wire[head : head + _nbytes(self.code, known, like)]
        if new:
            received[new] = self._start(wire[:head], like, [ids[i] for i in new])
        if known:
            received[known] = self._move(changes, like, [ids[i] for i in known])
        return received

    def _start(self, wire: Tensor, like: Tensor, ids: Sequence[int]) -> Tensor:
        received = self.first.unpacked(wire, (len(ids), *like.shape[1:]), like.dtype, like.dtype)
        self.kept.write(ids, started(received, sixteen(like.dtype)))
        return received

    def _move(self, wire: Tensor, like: Tensor, ids: Sequence[int]) -> Tensor:
        d = self.code.unpacked(wire, (len(ids), *like.shape[1:]), torch.float32, torch.float32)
        received, m = moved(self.kept.read(ids, like.device), d)
        self.kept.write(ids, m)
        return received.to(like.dtype)

    def _checksum(self, ids: Sequence[int], device: torch.device) -> Tensor:
        return checksum(self.kept.read(ids, device), ids)


def _nbytes(code: WireCode, places: Sequence[int], like: Tensor) -> int:
    """Of so many samples."""
    return code.nbytes((len(places), *like.shape[1:]), like.dtype)
