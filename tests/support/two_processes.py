"""Processes that compile into one cache folder at the same moment.

``python -m tests.support.two_processes FOLDER RANK WORLD ROUNDS`` trains a small model in each round, of another width,
so that its kernels are new. Before each round it waits for the others. It prints a line of JSON in each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8compile
from tests.support.sources import ROOT

STEPS, PATIENCE = 3, 300.0  # seconds
WIDTH = 128  # of the first round


def losses_and_report(width: int = WIDTH, **options: Any) -> dict[str, Any]:
    """What a small model of this width says after some steps: its losses, its weights, its report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.GELU())
    run = torch.compile(model, backend="fp8compile", options={"saved.min_numel": 0, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(32, 64), torch.randn(32, width)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(run(x), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    weights = [p.double().sum().item() for p in model.parameters()]
    return {"losses": losses, "weights": weights, "report": json.loads(fp8compile.report(model).to_json())}


def together(cache: Path, world: int, rounds: int) -> list[list[dict[str, Any]]]:
    """What each of ``world`` processes with this cache folder says, round by round."""
    folder = cache.parent
    line = [sys.executable, "-m", "tests.support.two_processes", str(folder)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    started = [
        subprocess.Popen(
            [*line, str(rank), str(world), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )
        for rank in range(world)
    ]
    said = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors
    return [[json.loads(line) for line in printed.splitlines()] for printed, _ in said]


def wait_for_all(folder: Path, round_: int, rank: int, world: int) -> None:
    """Return when every process is here."""
    (folder / f"round-{round_}-rank-{rank}").touch()
    late = time.monotonic() + PATIENCE
    while not all((folder / f"round-{round_}-rank-{other}").exists() for other in range(world)):
        assert time.monotonic() < late, "the other process does not come"
        time.sleep(0.001)


def main(folder: Path, rank: int, world: int, rounds: int) -> None:
    for round_ in range(rounds):
        wait_for_all(folder, round_, rank, world)
        print(json.dumps(losses_and_report(WIDTH + 16 * round_)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
