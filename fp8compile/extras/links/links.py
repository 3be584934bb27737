"""What one stage of a pipeline sends and receives as codes: ``Links``, which ``pipelining.py`` ties to a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._arguments import is_count
from fp8compile.extras.links.link_ends import ChangesEnd, DirectEnd
from fp8compile.numerics.wire_codes import can_be_coded

End = ChangesEnd | DirectEnd


@dataclass
class Traffic:
    """Bytes that one direction has sent.

    Attributes:
        sent: of codes, their scales and checksums.
        plain: of the same tensors as they were.
    """

    sent: int = 0
    plain: int = 0


@dataclass(frozen=True)
class _Expected:
    """A message on its way: what its bytes are decoded by, of which samples, and into which buffer of the stage."""

    end: End
    ids: Sequence[int] | None
    wire: Tensor
    buffer: Tensor


class Links:
    """What one stage sends and receives; ``state_dict`` goes into a checkpoint beside the model's.

    Attributes:
        forward, backward: bytes that this stage has sent, of activations and of gradients.
    """

    def __init__(self, stage: Any, make: Callable[[], End], gradients: DirectEnd | None) -> None:
        self.forward, self.backward = Traffic(), Traffic()
        self._stage, self._make, self._gradients = stage, make, gradients
        self._remembers = isinstance(make(), ChangesEnd)
        self._ends: dict[str, list[End]] = {"outgoing": [], "incoming": []}
        self._ids: Sequence[int] | None = ()
        self._used: set[tuple[str, int]] = set()
        self._expected: dict[tuple[str, int], list[_Expected]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on this host of what is remembered of samples."""
        every = (end for ends in self._ends.values() for end in ends)
        return sum(end.kept.nbytes for end in every if isinstance(end, ChangesEnd))

    def samples(self, ids: Sequence[int] | Tensor | None) -> None:
        """Say which samples the next step has; before each step, on every rank that has a stage, the same on all.

        Behind a step that raised, the ends of a link may remember different messages: load the state of a checkpoint, or
        ``{"outgoing": [], "incoming": []}``, which forgets all, on every stage.

        Args:
            ids: one integer for each row of the batch, in its order, the same for a sample in every epoch. None from here on:
                samples that do not come again (validation). They are sent as on a first visit and not remembered.

        Raises:
            ValueError: no integers of 64 bits, or one twice.
        """
        found = ids.tolist() if isinstance(ids, Tensor) and ids.dim() == 1 else ids
        if found is not None:
            if not isinstance(found, Sequence) or not all(is_count(i) and -(2**63) <= i < 2**63 for i in found):
                raise ValueError(
                    "samples(ids): a list or 1-d tensor of integers of 64 bits is needed, one for each row"
                )
            if len(set(found)) != len(found):
                twice = next(i for i in found if list(found).count(i) > 1)
                raise ValueError(f"samples(ids): {twice} is there twice; a sample has one row in a batch, and one id")
        self._ids = found if found is None else [int(i) for i in found]
        self._used.clear()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of samples, of each tensor that this stage sends and receives; empty with ``changes=False``."""
        return {
            side: [end.kept.state_dict() for end in ends if isinstance(end, ChangesEnd)]
            for side, ends in self._ends.items()
            if self._remembers
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it on every stage, from the same step.

        Raises:
            ValueError: no such state, or one that remembers where these links do not.
        """
        if set(state) != set(self._ends if self._remembers else ()):
            raise ValueError(
                f"links have {[*state]} and need {[*self.state_dict()]}: both runs need the same changes="
            )
        loaded: dict[str, list[End]] = {}
        for side, kept in state.items():
            loaded[side] = [self._make() for _ in kept]
            for end, each in zip(loaded[side], kept, strict=True):
                assert isinstance(end, ChangesEnd)
                end.kept.load_state_dict(each)
        self._ends |= loaded

    def send_activations(self, ops: Sequence[Any], chunk: int) -> None:
        for op, end, ids in self._coded("outgoing", ops, chunk):
            self._send(op, end, ids, self.forward)

    def receive_activations(self, ops: Sequence[Any], chunk: int) -> None:
        self._expect("forward", chunk, self._coded("incoming", ops, chunk))

    def send_gradients(self, ops: Sequence[Any], chunk: int) -> None:
        for op in ops if self._gradients else ():
            if can_be_coded(op.tensor.dtype):
                self._send(op, self._gradients, None, self.backward)

    def receive_gradients(self, ops: Sequence[Any], chunk: int) -> None:
        coded = [(op, self._gradients, None) for op in ops if self._gradients and can_be_coded(op.tensor.dtype)]
        self._expect("backward", chunk, coded)

    def _send(self, op: Any, end: Any, ids: Sequence[int] | None, traffic: Traffic) -> None:
        with torch.no_grad():
            wire = end.encode(op.tensor, ids)
        traffic.sent += wire.nbytes
        traffic.plain += op.tensor.nbytes
        op.tensor = wire

    def _expect(self, direction: str, chunk: int, coded: Sequence[tuple[Any, Any, Sequence[int] | None]]) -> None:
        found = self._expected[direction, chunk] = []
        for op, end, ids in coded:
            wire = torch.empty(end.nbytes(op.tensor, ids), dtype=torch.uint8, device=op.tensor.device)
            found.append(_Expected(end, ids, wire, op.tensor))
            op.tensor = wire

    def arrived(self, direction: str, chunk: int) -> None:
        """Decode the messages that the schedule has waited for; none where a stage of this rank handed its tensors over."""
        with torch.no_grad():
            for each in self._expected.pop((direction, chunk), ()):
                each.buffer.copy_(each.end.decode(each.wire, each.buffer, each.ids))

    def _coded(self, side: str, ops: Sequence[Any], chunk: int) -> list[tuple[Any, End, Sequence[int] | None]]:
        """The operations whose tensors are coded, with what codes them; integers travel as they are."""
        floats = [op for op in ops if op.tensor.is_floating_point() or op.tensor.is_complex()]
        wrong = [op.tensor.dtype for op in floats if not can_be_coded(op.tensor.dtype)]
        if wrong:
            raise ValueError(
                f"a stage sends {wrong[0]}: links code FP32, BF16 and FP16; cast it, or leave links plain"
            )
        ends = self._ends[side]
        ends += [self._make() for _ in range(len(floats) - len(ends))]
        rows = [len(op.tensor) if op.tensor.dim() else 0 for op in floats]
        ids = [self._ids_of(side, chunk, n) for n in rows]
        if floats:
            self._used.add((side, chunk))
        return list(zip(floats, ends, ids, strict=True))

    def check_ids(self, side: str, chunk: int) -> None:
        """Raise where a step begins without ids of its own; before a stage has made buffers for it."""
        missing = self._ids is not None and (not self._ids or (side, chunk) in self._used)
        if self._remembers and missing:
            raise ValueError(
                "links that send changes need samples(ids) before each step, the ids of its batch's rows"
            )

    def _ids_of(self, side: str, chunk: int, rows: int) -> Sequence[int] | None:
        """Of a micro-batch of so many rows."""
        self.check_ids(side, chunk)
        if self._ids is None or not self._remembers:
            return None
        batch = rows * (self._stage.chunks or 0)
        ids = self._ids[chunk * rows : (chunk + 1) * rows]
        if not ids or len(ids) != rows or batch not in (0, len(self._ids)):
            raise ValueError(
                f"samples(ids) were {len(self._ids)} ids, and each micro-batch has {rows} rows in its first dimension: one "
                "id for each row of the batch is needed; a stage that sends what has no samples needs changes=False"
            )
        return ids
