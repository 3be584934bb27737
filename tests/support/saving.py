"""A checkpoint written so that a kill at any moment leaves a whole one, as the guide says; and kills at chosen moments.

    save:  a temporary name in the same folder, flush, fsync, os.replace

``python -m tests.support.saving FOLDER...`` dies in each FOLDER, in a process of its own for each: it loads the checkpoint
there, trains one step, saves, and is killed by SIGKILL, a signal that nothing can catch, at the moment that the folder's name
ends in. Moments from 0 to 1 are fractions of the bytes that the save writes; then come ``MOMENTS``, by name.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.support.checkpoints import Net, of, train

NAME = "checkpoint.pt"
BEFORE_FSYNC, BEFORE_REPLACE, AFTER_REPLACE = MOMENTS = ("fsync", "replace", "replaced")
IN_PLACE = "in place"


def save(state: Any, path: str) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def everything(net: Net, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def loaded(path: Path) -> tuple[Net, torch.optim.Optimizer, int]:
    """Model, optimizer and step of a checkpoint."""
    state = torch.load(path, weights_only=True)
    net = Net()
    optimizer = of("AdamW", net)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return net, optimizer, state["step"]


def one_step(net: Net, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Train a step on gradients that its number decides; returns the next number."""
    train(net, optimizer, 1, seed=step)
    return step + 1


class Deadly(io.FileIO):
    """A file whose process is killed when so many bytes are written."""

    def __init__(self, path: str, mode: str, left: int) -> None:
        super().__init__(path, mode)
        self.left = left

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < self.left:
            self.left -= len(view)
            return super().write(view)
        super().write(view[: self.left])
        killed()


def killed(*_: Any) -> NoReturn:
    """The end of this process, as by ``kill -9``."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is still alive")


def die(folder: Path) -> None:
    """Train a step from the checkpoint in the folder, save, and be killed on the way."""
    path, moment = str(folder / NAME), folder.name.split("-")[-1]
    net, optimizer, step = loaded(folder / NAME)
    step = one_step(net, optimizer, step)
    state = everything(net, optimizer, step)
    whole = io.BytesIO()
    torch.save(state, whole)
    if moment == BEFORE_FSYNC:
        os.fsync = killed  # type: ignore[assignment]
    elif moment == BEFORE_REPLACE:
        os.replace = killed  # type: ignore[assignment]
    elif moment != AFTER_REPLACE:
        left = max(1, round(float(moment) * whole.tell()))
        opened: Callable[[str, str], Any] = lambda name, mode: Deadly(name, mode, left)  # noqa: E731
        globals()["open"] = opened
    if folder.name.startswith(IN_PLACE):
        with open(path, "wb") as file:
            torch.save(state, file)
    else:
        save(state, path)
    killed()


def main(folders: list[str]) -> int:
    """Die in every folder; 0 if each process was killed by the signal, and by nothing else."""
    for folder in folders:
        child = os.fork()
        if child == 0:
            try:
                die(Path(folder))
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            print(f"{folder}: ended by {status}, not by SIGKILL", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
