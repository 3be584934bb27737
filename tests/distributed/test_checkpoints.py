"""A compiled FP16 model, its optimizer and its loss scaler: saved by 2 ranks, loaded by 1 and by 3, and they go on as one.

Every rank has the same rows. All but rank 0 multiply the loss by 0, and the gradients are summed, not averaged. So the sum is
rank 0's gradient on any number of ranks, exactly, and nothing may differ from a run that never stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8compile.amp import LossScaler
from tests.support.parallel import Setup, differing, digests, loss_of, whole
from tests.support.ranks import on_ranks

SETUP = Setup(dtype=torch.float16, blocks=True)
SAVED, END = 2, 4


class Run:
    """A sharded model, its optimizer and its scaler, on this rank."""

    def __init__(self) -> None:
        self.model = SETUP.compiled(SETUP.net())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in [*self.model.blocks, self.model]:  # type: ignore[misc]
            fully_shard(each, mesh=mesh)
            each.set_gradient_divide_factor(1.0)
        self.optimizer = SETUP.optimizer(self.model)
        self.scaler = LossScaler()

    def steps(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            x, labels = SETUP.batch(0, number)
            loss = loss_of(self.model(x), labels)
            self.scaler.scale(loss * (dist.get_rank() == 0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def held(self) -> dict[str, Any]:
        """Digests of all that is held, whole, and the scale."""
        parameters = {name: whole(p).tolist() for name, p in self.model.named_parameters()}
        return {**parameters, **digests(self.model, self.optimizer), "scale": self.scaler.get_scale()}

    def document(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def take(self, document: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=document["model"],
            optim_state_dict=document["optimizer"],
        )
        self.scaler.load_state_dict(document["scaler"])


def save(folder: Path) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Train, save, and go on: what was held then, the losses after it, and what is held in the end."""
    run = Run()
    run.steps(range(SAVED))
    then = run.held()
    dcp.save(run.document(), checkpoint_id=folder)
    losses = run.steps(range(SAVED, END))
    return then, losses, run.held()


def load(folder: Path) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    run = Run()
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    document = run.document()
    dcp.load(document, checkpoint_id=folder)
    run.take(document)
    then = run.held()
    losses = run.steps(range(SAVED, END))
    return then, losses, run.held()


@pytest.mark.sweep
def test_model_optimizer_and_scaler_go_from_two_ranks_to_any(tmp_path: Path) -> None:
    wanted = on_ranks(2, save, tmp_path)[0]
    assert wanted[0]["scale"] == 2.0**SAVED, "the scale has moved, so that a lost one is seen"
    for world in (1, 2, 3):
        for found in on_ranks(world, load, tmp_path):
            assert not differing(found[0], wanted[0])
            assert found[1] == wanted[1]
            assert not differing(found[2], wanted[2])


class Small(nn.Module):
    """Of which three ranks have fewer elements each than the optimizer encodes in a parameter, or no row at all."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.rows = (nn.Parameter(torch.ones(shape)) for shape in ((66, 64), (2, 4096)))


def kinds() -> dict[str, Any]:
    """By parameter and key, the dtype and the whole shape of a state after one step."""
    from fp8compile import optim

    model = Small()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optim.AdamW(model, compiled=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {
        f"{name} {key}": (str(value.dtype), tuple(value.shape))
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def test_the_format_of_a_state_does_not_depend_on_the_size_of_a_shard() -> None:
    """torchao #4912: a state that is encoded on some ranks and not on others cannot be saved together."""
    alone = on_ranks(1, kinds)[0]
    assert "few exp_avg.e4m3_expanded.codes" in alone
    for found in on_ranks(3, kinds):
        assert found == alone
