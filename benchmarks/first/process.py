"""The process of an arm: started, stopped and continued, let go to be timed, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.first import nsight
from benchmarks.first.plan import Arm
from benchmarks.first.speaking import VARIABLE, Told, dies_with_parent

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """Of one arm.

    Attributes:
        arm: which.
        ran: seconds that it ran and was neither ready nor stopped.
    """

    def __init__(self, arm: Arm, told: Told, logs: Path) -> None:
        self.arm, self.ran, self.told = arm, 0.0, replace(told, job=arm.name)
        self.log = logs / f"{arm.name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(logs),
                env={**os.environ, **_own_caches(logs, arm), **dict(arm.variables), VARIABLE: self._told_as_text()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent,
            )

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self._process.poll() is not None

    @property
    def ready(self) -> bool:
        """Whether it is compiled and waits."""
        return not self.done and Path(self.told.work, f"ready-{self.arm.name}").exists()

    @property
    def busy(self) -> bool:
        """Whether it compiles, or runs without a wait."""
        return not self.done and not self.ready

    @property
    def gib(self) -> float:
        """What it may take on the device."""
        kind = self.arm.kind
        return 0.0 if self.done else (kind.held_gib or 0.0) if self.ready else kind.compiling_gib

    def stop(self) -> None:
        """Let it stand still."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def let_go(self) -> None:
        """It may be timed."""
        Path(self.told.work, f"go-{self.arm.name}").touch()

    def kill(self) -> None:
        """End it and all that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """The last line of its log, and how it ended."""
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["without a word"]
        return f"exit status {self._process.returncode}: {lines[-1][:300]}"

    def _told_as_text(self) -> str:
        return json.dumps(asdict(self.told))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _command(self, logs: Path) -> list[str]:
        under = nsight.command(logs / f"{self.arm.name}.csv") if self.arm.words[0] == "ncu" else []
        return [*under, sys.executable, str(ROOT / "benchmarks" / "first" / "arm.py"), *self.arm.words]


def _own_caches(folder: Path, arm: Arm) -> dict[str, str]:
    """Empty ones: a first step is a first step, and a file that a kill cut in half is found by nobody."""
    cache = folder / "caches" / arm.name
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
