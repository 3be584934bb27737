"""The numbers of a step to other places: TensorBoard, wandb, trackio, or a function of the user's.

Each is imported here alone, where it is asked for. A place that fails is said once and left out from then on.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8compile._messages import nearest
from fp8compile.extras.watching.lines import scalars_of

_log = logging.getLogger("fp8compile")
Send = Callable[[int, Mapping[str, float]], Any]  # (step, numbers by name)
MISSING = "watch(to={!r}) needs {}, which is not installed: pip install {}"
NOT_BEGUN = "watch(to={0!r}): {0} has no run. Fix: call {0}.init(...) before fp8compile.extras.watching.watch"
FAILED = "step %d could not be sent to %s (%s: %s): it gets no more steps; training and the run's file go on"


class Sends:
    """Sends the numbers of each step to all places.

    Args:
        to: names from ``PLACES``, or functions of (step, numbers by name).
        folder: of the run; TensorBoard's files go there too.

    Raises:
        ValueError: a name that is not known; wandb or trackio without a run.
        ImportError: the package of a name is not installed.
    """

    def __init__(self, to: Iterable[str | Send], folder: str | os.PathLike[str]) -> None:
        self._sends: list[tuple[str, Send]] = [_made(each, Path(folder)) for each in to]

    def send(self, record: Mapping[str, Any]) -> None:
        """Hand a step's numbers on; those that are inf or NaN go along as they are."""
        for place in list(self._sends):
            name, send = place
            try:
                send(record["step"], scalars_of(record))
            except Exception as error:  # another program's trouble is not the training's
                self._sends.remove(place)
                _log.warning(FAILED, record["step"], name, type(error).__name__, error)


def _made(to: str | Send, folder: Path) -> tuple[str, Send]:
    if callable(to):
        return getattr(to, "__name__", type(to).__name__), to
    if to not in PLACES:
        raise ValueError(f"watch(to=...) takes functions of (step, numbers) and names, not {to!r}."
                         f"{nearest(str(to), PLACES)}")  # fmt: skip
    return to, PLACES[to](folder)


def _tensorboard(folder: Path) -> Send:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise ImportError(MISSING.format("tensorboard", "tensorboard", "tensorboard")) from missing
    writer: Any = SummaryWriter(str(folder))

    def send(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return send


def _wandb(folder: Path) -> Send:
    wandb = _imported("wandb")
    if wandb.run is None:
        raise ValueError(NOT_BEGUN.format("wandb"))
    return lambda step, scalars: wandb.log({"train_step": step, **scalars})  # its own step must never go back


def _trackio(folder: Path) -> Send:
    trackio = _imported("trackio")
    if trackio.context_vars.current_run.get() is None:
        raise ValueError(NOT_BEGUN.format("trackio"))
    return lambda step, scalars: trackio.log({"train_step": step, **scalars})


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise ImportError(MISSING.format(name, name, name)) from missing


PLACES: Mapping[str, Callable[[Path], Send]] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
