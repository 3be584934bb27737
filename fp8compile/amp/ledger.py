"""The host's side of a loss scaler: the outcome of each update, read late, together with what must be read anyway.

An update leaves a record on the device. The next ``step`` has to know whether its gradients are finite, and all records are
read in that same copy. So a collapse is raised by the step after the update that showed it, before that step trains.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8compile.amp.collapse import Limits, Watchdog
from fp8compile.amp.policies import SEEN, UpdateStats

RECORD = (*SEEN, "scale", "verdict")
HISTORY = 10_000  # updates that are kept
_PENDING = 64  # records that may wait, where nobody calls step
_log = logging.getLogger("fp8compile")


class Listener(Protocol):
    """Hears of updates."""

    def ended(self, update: int) -> None:
        """An update has just ended; what came of it may still be on the device."""

    def taken(self, update: int, record: Mapping[str, float]) -> None:
        """What came of an update has reached the host: by name as in ``RECORD``. One update or more later."""


class Ledger:
    """Records of updates: history of the scale, skipped steps, warnings, TensorBoard.

    Args:
        limits: of the watchdog.
        raises: whether a collapse is an error.
        writer: has ``add_scalar(tag, value, step)``; or None.

    Attributes:
        history: ``(update, scale after it)``, oldest first, the last ``HISTORY``.
        skipped: updates in which a step was skipped.
        collapse: (why, update, scale), once there was one.
        listeners: told of each update; of this process, so copies have none.
    """

    def __init__(self, limits: Limits, raises: bool, writer: Any) -> None:
        self.watchdog, self.raises, self.writer = Watchdog(limits), raises, writer
        self.history: deque[tuple[int, float]] = deque(maxlen=HISTORY)
        self.skipped = 0
        self.collapse: tuple[str, int, float] | None = None
        self.listeners: list[Listener] = []
        self._pending: list[tuple[int, Tensor]] = []
        self._was_bad = self._said_vanished = False

    def add(self, update: int, scale: Tensor, verdict: Tensor, seen: UpdateStats) -> None:
        """Record the outcome of an update: float64 ``[7]``, laid out as ``RECORD`` says."""
        self._pending.append((update, torch.cat([seen.numbers, scale.double()[None], verdict[None]])))
        if len(self._pending) >= _PENDING:
            self.read()

    def read(self, *flags: Tensor) -> list[float]:
        """Wait for the device, take in what is pending, and return the numbers of some 0-d tensors: one copy for all."""
        pending, self._pending = self._pending, []
        parts = [*(record for _, record in pending), *(flag.double().reshape(1) for flag in flags)]
        numbers = torch.cat(parts).tolist() if parts else []
        for i, (update, _) in enumerate(pending):
            self._take(update, dict(zip(RECORD, numbers[i * len(RECORD) :], strict=False)))
        return numbers[len(pending) * len(RECORD) :]

    def _take(self, update: int, record: dict[str, float]) -> None:
        self.history.append((update, record["scale"]))
        self._say(update, record)
        why = self.watchdog.look(self.history, record["verdict"])
        if why is not None and self.raises and self.collapse is None:
            blame = " (the loss itself is not finite: the data, or the forward)" if record["bad_loss"] else ""
            self.collapse = why + blame, update, record["scale"]
        if self.writer is not None:
            self._write(update, record)
        for listener in tuple(self.listeners):
            listener.taken(update, record)

    def end(self, update: int) -> None:
        """Tell the listeners that an update has ended. No host sync."""
        for listener in tuple(self.listeners):
            listener.ended(update)

    def _say(self, update: int, record: dict[str, float]) -> None:
        bad = record["found"] > 0
        self.skipped += bad
        if record["bad_loss"] and not self._was_bad:
            _log.warning("update %d: the loss was inf or NaN before it was scaled: it comes from the data or from the "
                         "forward, not from an overflow in the backward, and no loss scale helps", update)  # fmt: skip
        elif bad and not self._was_bad:
            _log.warning(
                "update %d: inf or NaN in the gradients, step skipped (loss scale now %g)", update, record["scale"]
            )
        self._was_bad = bad or record["bad_loss"] > 0
        if record["vanished"] and not self._said_vanished:
            self._said_vanished = True
            _log.warning("update %d: %d FP16 gradients became 0 when they were divided by the loss scale; optimizers of "
                         "fp8compile.optim take them in FP32 and lose none", update, record["vanished"])  # fmt: skip

    def _write(self, update: int, record: dict[str, float]) -> None:
        seen = record["small"] + record["large"]
        self.writer.add_scalar("loss_scale/scale", record["scale"], update)
        self.writer.add_scalar("loss_scale/skipped", float(record["found"] > 0), update)
        if seen:
            self.writer.add_scalar("loss_scale/large_fraction", record["large"] / seen, update)

    def acknowledge(self, update: int) -> str | None:
        """Clear the collapse that was noticed; returns what it was, None if there was none. The watchdog starts afresh."""
        self.read()
        if self.collapse is None:
            return None
        (why, step, scale), self.collapse = self.collapse, None
        self.watchdog.acknowledge(update)
        said = f"update {step}: {why}; the loss scale was {scale:g}"
        _log.warning("acknowledged, training goes on: %s", said)
        return said

    def state(self) -> dict[str, Any]:
        return {"history": list(self.history), "skipped": self.skipped, "watchdog": self.watchdog.state()}

    def restore(self, history: Sequence[tuple[int, float]], skipped: int, watchdog: Mapping[str, Any]) -> None:
        self._pending, self.collapse = [], None
        self.history = deque(((int(step), float(scale)) for step, scale in history), maxlen=HISTORY)
        self.skipped = int(skipped)
        self.watchdog.restore(watchdog)


def tensorboard(writer: Any) -> Any:
    """``writer``; for a folder's name a SummaryWriter, or None with a warning where tensorboard is not installed.

    Raises:
        ValueError: it is neither a folder nor a writer.
    """
    if writer is None or callable(getattr(writer, "add_scalar", None)):
        return writer
    if not isinstance(writer, (str, os.PathLike)):
        raise ValueError(f"writer={writer!r}: a SummaryWriter (it has add_scalar) or the name of a folder is needed")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _log.warning("tensorboard is not installed, so no scalars go to %s: pip install tensorboard", writer)
        return None
    return SummaryWriter(os.fspath(writer))
