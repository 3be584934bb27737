"""A rank that is killed in a step: all end, it is named, and what was saved before is whole, for a world of any size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.dying_rank import PLACES, SAVED
from tests.support.parallel import Setup, differing, digests, loss_of, mean, whole
from tests.support.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]
NAMED = r"rank\s*: 1 \(local_rank: 1\)\s*exitcode\s*: -9 "  # of torchrun's list of failures


def killed(folder: Path, place: str) -> str:
    """What torchrun says of the run whose rank 1 is killed at a place."""
    words = ["--standalone", "--nproc-per-node", "2", "-m", "tests.support.dying_rank", str(folder), place]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0 and "still trains" not in done.stdout
    return done.stdout + done.stderr


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {**{name: whole(p).tolist() for name, p in model.named_parameters()}, **digests(model, optimizer)}


def wanted() -> dict[str, Any]:
    """What two ranks hold after the steps before the checkpoint, by one process."""
    setup = Setup()
    model = setup.compiled(setup.net())
    optimizer = setup.optimizer(model)
    for step in range(SAVED):
        gradients = []
        for shard in range(2):
            x, labels = setup.batch(shard, step)
            gradients.append(torch.autograd.grad(loss_of(model(x), labels), list(model.parameters())))
        for p, *each in zip(model.parameters(), *gradients, strict=True):
            p.grad = mean(each)
        optimizer.step()
    return held(model, optimizer)


def loaded(folder: Path) -> dict[str, Any]:
    """What a world of this size finds in the checkpoint; it takes a step with it."""
    setup = Setup()
    model = setup.net()
    optimizer = setup.optimizer(model)
    states = get_state_dict(model, optimizer)
    document = {"model": states[0], "optimizer": states[1]}
    dcp.load(document, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=document["model"], optim_state_dict=document["optimizer"])
    found = held(model, optimizer)
    x, labels = setup.batch(0, SAVED)
    loss_of(setup.compiled(model)(x), labels).backward()
    optimizer.step()
    return found


def check(folder: Path, place: str, worlds: tuple[int, ...]) -> None:
    said = killed(folder, place)
    assert re.search(NAMED, said), said
    before = wanted()
    for world in worlds:
        for found in on_ranks(world, loaded, folder):
            assert not differing(found, before)


def test_a_rank_that_is_killed_in_the_backward(tmp_path: Path) -> None:
    check(tmp_path / "checkpoint", "backward 3", (1,))


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_killed_anywhere(tmp_path: Path, place: str) -> None:
    check(tmp_path / "checkpoint", place, (1, 3) if place == "loss" else (1,))
