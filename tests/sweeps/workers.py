"""Jobs in processes of their own: one that dies, or hangs, costs its own job and no other.

A worker is a Python process that reads one job a line on its standard input and answers one line of JSON on a pipe of its
own; what the job prints is thrown away. It is replaced after ``FRESH_AFTER`` jobs, so that what compilers keep stays small.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

FRESH_AFTER = 60


def serve(answer: Callable[[str], Any]) -> None:
    """The worker's side: answer every line of standard input, until it ends."""
    out = os.fdopen(int(os.environ["SWEEP_ANSWERS"]), "w")
    for line in sys.stdin:
        out.write(json.dumps(answer(line.rstrip("\n"))) + "\n")
        out.flush()


def run_jobs(
    module: str,
    jobs: Iterable[str],
    done: Callable[[str, Any], None],
    failed: Callable[[str, str], Any],
    processes: int,
    seconds: float,
) -> None:
    """Have every job answered by ``python -m module --worker``; ``done(job, answer)`` is called for each, in one thread.

    ``failed(job, why)`` makes the answer of a job whose process died or took longer than ``seconds``.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    count = 0
    for job in jobs:
        waiting.put(job)
        count += 1

    def work() -> None:
        worker, asked = None, 0
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None or asked == FRESH_AFTER:
                if worker is not None:
                    worker.stop()
                worker, asked = _Worker(module), 0
            answer, why = worker.ask(job, seconds)
            asked += 1
            if why:
                worker.stop()
                worker = None
            answers.put((job, failed(job, why) if why else answer))
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        done(*answers.get())
    for thread in threads:
        thread.join()


class _Worker:
    def __init__(self, module: str) -> None:
        self.read, write = os.pipe()
        command: Sequence[str] = [sys.executable, "-m", module, "--worker"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            env={**os.environ, "SWEEP_ANSWERS": str(write)},
            text=True,
        )
        os.close(write)
        self.buffer = b""

    def ask(self, job: str, seconds: float) -> tuple[Any, str]:
        """The answer, or why there is none."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(job + "\n")
            self.process.stdin.flush()
        except OSError:
            return None, self._ended()
        while b"\n" not in self.buffer:
            if not select.select([self.read], [], [], seconds)[0]:
                return None, f"no answer in {seconds:.0f} s"
            part = os.read(self.read, 1 << 20)
            if not part:
                return None, self._ended()
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line), ""

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.read)

    def _ended(self) -> str:
        return f"the process ended with status {self.process.wait()}"
