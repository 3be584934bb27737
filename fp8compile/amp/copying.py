"""Copies and pickles of a loss scaler: its options and numbers go along, what belongs to this process does not.

Bound observations are found again behind the next loss. A deep copy stays in the same process and keeps the process group and
the TensorBoard writer; pickle leaves them out, with a warning.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Protocol, TypeVar

from fp8compile.amp.collapse import Limits
from fp8compile.amp.iteration import Iteration
from fp8compile.amp.ledger import Ledger
from fp8compile.amp.options import ScalerOptions
from fp8compile.amp.policies import PolicyState

_log = logging.getLogger("fp8compile")


class CopiedScaler(Protocol):
    """What copies and pickles need of a loss scaler (``scaler.LossScaler``)."""

    options: ScalerOptions
    process_group: Any
    _enabled: bool
    _iteration: Iteration
    _ledger: Ledger
    _state: PolicyState | None
    _restored: dict[str, Any] | None
    _updates: int
    _idle: bool | None

    def _begin(self, options: ScalerOptions, ledger: Ledger, group: Any, enabled: bool) -> None: ...


S = TypeVar("S", bound=CopiedScaler)


class Copyable:
    """Makes a LossScaler copyable and picklable."""

    def __getstate__(self: CopiedScaler) -> dict[str, Any]:
        return pickled(self)

    def __setstate__(self: CopiedScaler, state: dict[str, Any]) -> None:
        unpack(self, state)

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        own = {"process_group": self.process_group, "writer": self._ledger.writer}
        memo[id(self)] = copied = object.__new__(type(self))
        unpack(copied, copy.deepcopy(packed(self), memo) | own)
        return copied


def packed(scaler: CopiedScaler) -> dict[str, Any]:
    """Everything that another scaler needs to go on as this one would; waits for the device.

    Raises:
        RuntimeError: an iteration is under way: its gradients cannot go along.
    """
    if scaler._iteration.has_begun:
        raise RuntimeError("a LossScaler is copied or pickled between update() and the next scale(): an iteration is under "
                           "way. Copy it after update()")  # fmt: skip
    ledger = scaler._ledger
    ledger.read()
    return {
        "options": scaler.options,
        "enabled": scaler._enabled,
        "raises": ledger.raises,
        "numbers": scaler._state.numbers() if scaler._state is not None else scaler._restored,
        "updates": scaler._updates,
        "idle": scaler._idle,
        "ledger": ledger.state(),
        "collapse": ledger.collapse,
        "said": (ledger._was_bad, ledger._said_vanished),
    }


def pickled(scaler: CopiedScaler) -> dict[str, Any]:
    """The same, for another process; a warning names what is left out."""
    left = {"process_group": scaler.process_group, "writer": scaler._ledger.writer}
    names = " and ".join(name for name, value in left.items() if value is not None)
    if names:
        _log.warning("a LossScaler was pickled without its %s, of this process alone: build LossScaler(%s) there and give "
                     "it state_dict()", names, ", ".join(f"{n}=..." for n in left if left[n] is not None))  # fmt: skip
    return packed(scaler)


def unpack(scaler: CopiedScaler, state: dict[str, Any]) -> None:
    """Restore what was packed into a scaler whose constructor did not run."""
    own = Ledger(Limits(), state["raises"], state.get("writer"))
    own.restore(**state["ledger"])
    own.collapse, (own._was_bad, own._said_vanished) = state["collapse"], state["said"]
    scaler._begin(state["options"], own, state.get("process_group"), state["enabled"])
    scaler._restored, scaler._updates, scaler._idle = state["numbers"], state["updates"], state["idle"]
