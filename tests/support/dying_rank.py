"""A program for torchrun: two ranks train by DDP and save; then one of them is killed in the midst of a step.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.support.dying_rank FOLDER WHERE

WHERE is one of ``PLACES`` of the step that follows the checkpoint: "backward 3" is when parameter 3 gets its gradient.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.support.parallel import Setup, loss_of

PARAMETERS = 14
AROUND = ("forward", "loss", "all-reduce", "optimizer", "optimizer done", "next forward")
PLACES = (*AROUND, *(f"backward {i}" for i in range(PARAMETERS)))
SAVED = 2  # steps before the checkpoint
PATIENCE = timedelta(seconds=60)


def kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _all_reduce(state, bucket):  # type: ignore[no-untyped-def]
    """DDP's hook: it wants these two names, and no annotation that is a text."""
    kill_self()


def step(setup: Setup, number: int, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> float:
    """One step on the rows of this rank."""
    x, labels = setup.batch(rank, number)
    loss = loss_of(model(x), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def arm(place: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Have this process die at a place of its next step."""
    if place == "forward":
        model.register_forward_pre_hook(kill_self)
    elif place == "loss":
        model.register_forward_hook(kill_self)
    elif place == "all-reduce":
        model.register_comm_hook(None, _all_reduce)
    elif place == "optimizer":
        optimizer.register_step_pre_hook(kill_self)
    elif place == "optimizer done":
        optimizer.register_step_post_hook(kill_self)
    elif place == "next forward":
        optimizer.register_step_post_hook(lambda *_: arm("forward", model, optimizer))
    else:
        [*model.parameters()][int(place.split()[1])].register_hook(kill_self)


def main(folder: Path, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank, setup = dist.get_rank(), Setup()
    net = setup.compiled(setup.net())
    model, optimizer = DistributedDataParallel(net), setup.optimizer(net)
    for number in range(SAVED):
        step(setup, number, model, optimizer, rank)
    states = get_state_dict(net, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    if rank == 1:
        arm(place, model, optimizer)
    for number in range(SAVED, SAVED + 3):
        step(setup, number, model, optimizer, rank)
    print(f"rank {rank} still trains", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
