"""The messages of samples, on the host: what one end of a link remembers of each activation that it sent or received.

Rows lie in slabs of about 64 MB, page-locked where the activations are on a GPU. Copies go in the order of its stream, and
the last one of a message is waited for: then the host may read the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.wire_codes import sixteen

SLAB_BYTES = 64 * 2**20
KEPT = (torch.bfloat16, torch.float16)


class SampleMessages:
    """One row for each sample, in two bytes an element.

    Attributes:
        shape: of a row; None before the first.
        dtype: FP16 for activations in FP16, else BF16; None before the first row.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None
        self._place: dict[int, int] = {}
        self._slabs: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._place)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are in use."""
        return len(self) * self._row_bytes

    def parts(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The places in ``ids`` of samples that are new, and of those that are known."""
        new = [i for i, each in enumerate(ids) if each not in self._place]
        return new, [i for i, each in enumerate(ids) if each in self._place]

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raises ValueError where rows have another shape or dtype than activations ``[samples, *shape]`` of ``dtype``."""
        if self.shape is None:
            return
        if (tuple(shape), sixteen(dtype)) != (self.shape, self.dtype):
            raise ValueError(
                f"a link's samples were {[*self.shape]} in {self.dtype} and are now {[*shape]} in {sixteen(dtype)}: a change "
                "needs the shape of the visit before; pad to one length, or compress_links(..., changes=False)"
            )

    def read(self, ids: Sequence[int], device: torch.device) -> Tensor:
        """``[len(ids), *shape]`` on ``device``, of samples that are known."""
        assert self.shape is not None
        rows = torch.empty((len(ids), *self.shape), dtype=self.dtype, device=device)
        for row, each in zip(rows, ids, strict=True):
            row.copy_(self._row(self._place[each]), non_blocking=True)
        return rows

    def write(self, ids: Sequence[int], rows: Tensor) -> None:
        """Keep rows ``[len(ids), *shape]``, of samples that are new or known."""
        if self.shape is None:
            self.shape, self.dtype = tuple(rows.shape[1:]), rows.dtype
        for i, (each, row) in enumerate(zip(ids, rows.detach(), strict=True)):
            place = self._place.setdefault(each, len(self._place))
            if place >= len(self._slabs) * self._rows_of_slab:
                self._slabs.append(self._slab(rows.is_cuda))
            self._row(place).copy_(row, non_blocking=i < len(ids) - 1)

    def state_dict(self) -> dict[str, Tensor]:
        """``ids`` int64 ``[N]`` and ``messages`` ``[N, *shape]``, a copy; nothing before the first sample."""
        if not self._place:
            return {}
        ids = list(self._place)
        return {"ids": torch.tensor(ids), "messages": self.read(ids, torch.device("cpu"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for what ``state_dict`` does not give, and leaves all as it was."""
        ids: Any = state.get("ids")
        messages: Any = state.get("messages")
        fits = isinstance(ids, Tensor) and isinstance(messages, Tensor) and messages.dtype in KEPT
        if state and not (fits and 0 < len(messages) == len(set(ids.tolist())) == len(ids)):
            raise ValueError(
                "messages of a link: ids and as many rows in BF16 or FP16 are needed, as state_dict() gave them"
            )
        self.__init__()  # type: ignore[misc]
        if state:
            self.write(ids.tolist(), messages)

    @property
    def _row_bytes(self) -> int:
        return 0 if self.shape is None else 2 * math.prod(self.shape)

    @property
    def _rows_of_slab(self) -> int:
        return max(1, SLAB_BYTES // max(1, self._row_bytes))

    def _slab(self, pinned: bool) -> Tensor:
        assert self.shape is not None
        return torch.empty((self._rows_of_slab, *self.shape), dtype=self.dtype, pin_memory=pinned)

    def _row(self, place: int) -> Tensor:
        slab, row = divmod(place, self._rows_of_slab)
        return self._slabs[slab][row]
