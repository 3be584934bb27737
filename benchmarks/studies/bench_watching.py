"""What ``fp8compile.extras.watching.watch`` costs: the demo trained twice side by side, from one seed, and one is watched.

    python benchmarks/studies/bench_watching.py --json benchmarks/results/watching-cpu.json
    python benchmarks/studies/bench_watching.py --json benchmarks/results/watching-cpu.json --observe

Both take blocks of five steps in turns (A B, B A, ...), as the demo's arms do. Three figures say what watching costs:

    side by side   median of (watched - plain) / plain over pairs of neighbouring blocks, each by its median step; and the
                   quartiles of these, which hold the machine's noise
    own time       seconds inside the watcher's hooks and ``log`` beside seconds of all watched steps, without the first
    dashboard      CPU seconds of ``fp8compile watch --serve`` beside seconds of the run; it is asked once a second for the
                   new lines, as an open page asks

Their losses must be equal bit for bit: watching changes nothing. A file has one run of each kind; the other stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.harness.output import write_json
from fp8compile.extras.demo import arms, compiling
from fp8compile.extras.demo.data import load_corpus
from fp8compile.extras.demo.loop import Task, Training
from fp8compile.extras.demo.model import SIZES, build_model
from fp8compile.extras.demo.precision import choose_precision
from fp8compile.extras.demo.results import Run
from fp8compile.extras.demo.turns import blocks


@dataclass
class Arm:
    """One of the two trainings; ``seconds`` of each step with what is logged of it, block by block."""

    training: Training
    watcher: Any = None
    seconds: list[list[float]] = field(default_factory=list)

    def take(self, steps: int, tokens: int) -> None:
        """A block of steps."""
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.training.step()
            if self.watcher is not None:
                self.watcher.log(loss=self.training.run.losses[-1], tokens=tokens)
            taken.append(time.perf_counter() - begin)
        self.seconds.append(taken)


def trained(size_name: str, steps: int, options: dict[str, Any], folder: str) -> tuple[Arm, Arm]:
    """Plain and watched, after ``steps`` steps each."""
    device, size = torch.device("cpu"), SIZES[size_name]
    precision = choose_precision(build_model(size, 0, device), device, "auto")
    task = Task(size, precision, load_corpus(), device, steps)
    both = []
    for _ in range(2):
        model = build_model(size, 0, device)
        step_model = compiling.compile_arm(arms.OURS, model, options)
        both.append(Arm(Training(Run(arms.OURS, 0), model, step_model, task)))
    plain, watched = both
    training = watched.training
    watched.watcher = fp8compile.extras.watching.watch(
        training.step_model, optimizer=training.optimizer, folder=folder
    )  # type: ignore[arg-type]
    for number, length in enumerate(blocks(steps)):
        for arm in both if number % 2 == 0 else both[::-1]:
            arm.take(length, size.tokens_per_step)
        if number == 0:
            watched.watcher.own_seconds = 0.0  # the first step writes the header, and imports
    watched.watcher.close()
    return plain, watched


def summary(plain: Arm, watched: Arm) -> dict[str, Any]:
    """The figures of both, without the first block, which compiles."""
    pairs = list(zip(plain.seconds[1:], watched.seconds[1:], strict=True))
    costs = [statistics.median(b) / statistics.median(a) - 1 for a, b in pairs]
    quartiles = statistics.quantiles(costs, n=4) if len(costs) > 1 else [costs[0]] * 3
    steps = [each for block in watched.seconds[1:] for each in block]
    return {
        "steps": len(watched.training.run.losses),
        "step_seconds_plain": statistics.median(each for block in plain.seconds[1:] for each in block),
        "step_seconds_watched": statistics.median(steps),
        "side_by_side": quartiles[1],
        "side_by_side_quartiles": [quartiles[0], quartiles[2]],
        "own_time": watched.watcher.own_seconds / sum(steps),
        "own_milliseconds_a_step": 1e3 * watched.watcher.own_seconds / len(steps),
        "losses_are_equal": plain.training.run.losses == watched.training.run.losses,
    }


ASKS = """
import sys, time, urllib.request
ask = lambda path: urllib.request.urlopen(sys.argv[1] + path, timeout=10).read()
seen = 0
while True:
    if ask("runs") != b"[]":
        seen += len(ask(f"lines?run=rank0&from={seen}"))
    time.sleep(1)
"""


@contextlib.contextmanager
def dashboard(folder: str) -> Iterator[dict[str, float]]:
    """The server of a run's page and one that asks it, each in a process; behind it ``seconds`` of the server's CPU."""
    found: dict[str, float] = {}
    command = [sys.executable, "-m", "fp8compile", "watch", "--serve", "--port", "0", folder]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[0]
    asking = subprocess.Popen([sys.executable, "-c", ASKS, address])
    try:
        yield found
        asking.kill()
        assert asking.wait() == -9, "the dashboard was asked until the end"
    finally:
        asking.kill()
        server.kill()
        used = os.wait4(server.pid, 0)[2]
        found["seconds"] = used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--observe", action="store_true", help="both take statistics of all values")
    parser.add_argument("--json", type=Path)
    values = parser.parse_args(argv)
    options = {"fp32.observe": True} if values.observe else {}
    with tempfile.TemporaryDirectory() as folder, dashboard(folder) as cpu:
        begin = time.perf_counter()
        found = {"size": values.size, **summary(*trained(values.size, values.steps, options, folder))}
        seconds = time.perf_counter() - begin
    found |= {"dashboard": cpu["seconds"] / seconds, "environment": environment()}
    print(json.dumps(found, indent=1))
    if values.json:
        runs = json.loads(values.json.read_text()) if values.json.exists() else {}
        write_json(values.json, runs | {"observed" if values.observe else "plain": found})
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # with two, two runs that nobody watches differ from step 4 or 5 on
    raise SystemExit(main())
