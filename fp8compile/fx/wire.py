"""Collectives that carry codes: each in two functions, one up to the exchange between ranks and one from it on.

    all_gather       each rank sends the codes of its shard; all decode all of them
    reduce_scatter   each rank sends every other rank the codes of that rank's part; the sum of the decoded parts is FP32
    all_reduce       a reduce_scatter, whose result is sent as codes again: every rank decodes the same codes, so that results
                     are bit-equal on all ranks (ZeRO++, arXiv 2306.10209, section 3.3)

A row of codes travels with its scales behind it, as bytes, in one message. Rows are filled up to a whole number of groups.
Shapes: ``x`` is what the plain collective takes. A message is ``uint8 [rows, bytes of a row]``: a row for each receiver, or
one for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics import GroupwiseBest

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


@dataclass(frozen=True)
class Wire:
    """One collective between ``ranks`` ranks, of tensors of one shape and dtype.

    Attributes:
        operation: ``ALL_GATHER``, ``REDUCE_SCATTER`` or ``ALL_REDUCE``.
        shape: of each rank's tensor.
        dtype: of each rank's tensor, and of the result.
        ranks: how many take part; ``group`` is the name of their process group.
        mean: whether the sum is divided by the number of ranks.
        codec: what rows are encoded by.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int
    group: str
    mean: bool = False
    codec: GroupwiseBest = field(default_factory=GroupwiseBest)

    @property
    def row(self) -> int:
        """Elements of a row: of the whole tensor, or of the part that one rank adds up."""
        rows = 1 if self.operation == ALL_GATHER else self.ranks
        return -(-math.prod(self.shape) // rows)

    @property
    def encoded(self) -> int:
        """Elements of a row as it is encoded, a whole number of groups."""
        return -(-self.row // self.codec.group_size) * self.codec.group_size

    @property
    def bytes_of_row(self) -> int:
        return self.encoded + self.encoded // self.codec.group_size * self.codec.scale_dtype.itemsize

    @property
    def sent(self) -> int:
        """Bytes that one rank sends."""
        messages = 2 if self.operation == ALL_REDUCE else 1
        return messages * (self.ranks - 1) * self.bytes_of_row

    @property
    def sent_plain(self) -> int:
        """Bytes that one rank sends without codes, in a ring (Thakur et al., 2005, bandwidth-optimal)."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self.operation == ALL_GATHER:
            return (self.ranks - 1) * nbytes
        return (2 if self.operation == ALL_REDUCE else 1) * (self.ranks - 1) * nbytes // self.ranks

    def begin(self, x: Tensor) -> Tensor:
        """Encode ``x`` and start the exchange; the result must be waited for."""
        if self.operation == ALL_GATHER:
            return self._gathered(self._packed(x.reshape(1, -1)))
        flat = torch.nn.functional.pad(x.reshape(-1), (0, self.ranks * self.row - x.numel()))
        return self._exchanged(self._packed(flat.reshape(self.ranks, self.row)))

    def end(self, received: Tensor) -> Tensor:
        """Wait for what ``begin`` started, and make the collective's result of it."""
        rows = self._unpacked(private.collectives.wait_tensor(received))
        if self.operation == ALL_GATHER:
            return rows.to(self.dtype).reshape(self.ranks * self.shape[0], *self.shape[1:])
        total = rows.sum(0) / self.ranks if self.mean else rows.sum(0)
        if self.operation == REDUCE_SCATTER:
            return total.to(self.dtype).reshape(self.shape[0] // self.ranks, *self.shape[1:])
        whole = self._unpacked(private.collectives.wait_tensor(self._gathered(self._packed(total.reshape(1, -1)))))
        return whole.reshape(-1)[: math.prod(self.shape)].to(self.dtype).reshape(self.shape)

    def _packed(self, rows: Tensor) -> Tensor:
        codes, inv_scale = self.codec.encode(torch.nn.functional.pad(rows, (0, self.encoded - self.row)))
        scales = inv_scale.contiguous().view(torch.uint8).reshape(rows.shape[0], -1)
        return torch.cat([codes.view(torch.uint8), scales], 1)

    def _unpacked(self, message: Tensor) -> Tensor:
        codes, scales = message[:, : self.encoded], message[:, self.encoded :]
        inv_scale = scales.contiguous().view(self.codec.scale_dtype).reshape(-1, 1)
        return self.codec.decode(codes.contiguous(), inv_scale, torch.float32)[:, : self.row]

    def _gathered(self, message: Tensor) -> Tensor:
        found: Tensor = private.collectives.all_gather_into_tensor(message, self.ranks, self.group)
        return found

    def _exchanged(self, message: Tensor) -> Tensor:
        each: Sequence[int] = [1] * self.ranks
        found: Tensor = private.collectives.all_to_all_single(message, each, each, self.group)
        return found
