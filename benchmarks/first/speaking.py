"""How an arm speaks with the run that started it. No torch is needed here."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.first import facts

VARIABLE = "FIRST_CONTACT"
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
PEERS = {"torchao", "liger_kernel", "flashoptim", "torchvision", "peft", "transformers"}


@dataclass(frozen=True)
class Told:
    """What the run says to an arm.

    Attributes:
        job: the arm's name.
        path: of the facts.
        work: a folder for the files that say ready and go.
        device, tiny: where, and in which size.
        began: when the run did.
        head: what all facts share: device, versions, commit.
    """

    job: str
    path: str
    work: str
    device: str
    tiny: bool
    began: float
    head: dict[str, Any]

    @classmethod
    def here(cls) -> Told:
        """Of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def say(self, what: str, **row: Any) -> None:
        """A fact."""
        fact = {"job": self.job, "t": round(time.time() - self.began, 1), "what": what, **row, **self.head}
        facts.append(Path(self.path), fact)

    def ready(self) -> None:
        """Compiled: say so, and wait to be let go. The run kills an arm that is not."""
        Path(self.work, f"ready-{self.job}").touch()
        while not Path(self.work, f"go-{self.job}").exists():
            time.sleep(0.02)

    def failed(self, what: str, error: BaseException) -> None:
        """An error as a fact."""
        trace = "".join(traceback.format_exception(error))
        self.say(what, error=f"{type(error).__name__}: {str(error)[:600]}", tail=_without_folders(trace)[-1500:])


def outcome_of(error: BaseException) -> str:
    """How an arm ended."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in PEERS:
        return facts.MISSING
    if (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "out of memory" in str(error).lower()
    ):
        return facts.NO_MEMORY
    return facts.FAILED


def closed(told: Told, began: float, error: BaseException | None) -> NoReturn:
    """Say how it ended, and leave."""
    outcome = facts.DONE if error is None else outcome_of(error)
    if error is not None:
        told.failed("error", error)
    told.say(facts.END, outcome=outcome, seconds=round(time.time() - began, 1))
    sys.stdout.flush()
    os._exit(int(error is not None))  # threads of compilers would keep it


def dies_with_parent() -> None:
    """A run that is killed leaves no arm on the device, not even one that is stopped."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def _without_folders(trace: str) -> str:
    return trace.replace(str(Path(__file__).resolve().parents[2]) + "/", "").replace(sys.prefix + "/", "")
