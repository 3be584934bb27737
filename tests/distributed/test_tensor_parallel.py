"""Tensor and sequence parallelism, alone and within fully_shard: not a bit differs from a model written in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8compile
from fp8compile.numerics.metrics import sqnr
from fp8compile.observe import records
from fp8compile.reporting.entries import LINEAR
from tests.support.parallel import Setup, loss_of
from tests.support.parallel_modes import compared, cut_for_tensor_parallelism
from tests.support.ranks import on_ranks

NAMES = ["TP", "TP, FP16", "sequence parallel", "FSDP2 + TP"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallelism(name: str) -> None:
    found = compared(name)
    assert found.losses and not found.parameters and not found.states
    assert found.replicas and found.scales is not False and found.counts is not False
    in_graphs = 12 if name == "FSDP2 + TP" else 15  # blocks compiled one by one leave the head in no graph
    assert found.linears == 12 and found.of == in_graphs and found.as_alone


def stored(saved: str) -> tuple[float, list[Any], list[str], int]:
    """The loss of the first step, gradients of this rank's parts, why large tensors stay exact, how many are codes."""
    torch._dynamo.reset()
    setup = Setup(options={"saved": saved})
    model = setup.net()
    cut_for_tensor_parallelism(model)
    setup.compiled(model)
    x, labels = setup.batch(0, 0)
    loss = loss_of(model(x), labels)
    loss.backward()
    report = fp8compile.report(model)
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    reasons = [skip.reason for skip in report.skips if skip.info.nbytes >= 2**14 and skip.bytes]
    return loss.item(), gradients, reasons, len(report.saved)


def stored_beside_exact() -> tuple[bool, list[float], list[str], int]:
    """Whether the loss is the same; what codes make of gradients, in dB; reasons to stay exact; how many are codes."""
    (loss, gradients, reasons, count), (exact_loss, exact, _, _) = stored("groupwise"), stored("off")
    return loss == exact_loss, [sqnr(e, g) for e, g in zip(exact, gradients, strict=True)], reasons, count


@pytest.mark.sweep
def test_what_a_sum_over_ranks_reads_in_the_backward_is_stored() -> None:
    for same, quality, reasons, count in on_ranks(2, stored_beside_exact):
        assert same, "codes are made for the backward; the forward does not read them"
        assert count and not [reason for reason in reasons if "does not know" in reason]
        assert min(quality) > 20, "the bar of fp8compile.check"


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 46)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.up(torch.relu(x)))


def uneven() -> list[tuple[str, str, str]]:
    """46 columns on 3 ranks: 16 + 16 + 14. Module, direction and the reason of each matmul, "" where it is FP8."""
    torch.manual_seed(0)
    model = One()
    parallelize_module(model, init_device_mesh("cpu", (3,)), {"up": ColwiseParallel(output_layouts=Replicate())})
    Setup().compiled(model)
    model(torch.randn(32, 64)).square().mean().backward()
    report = fp8compile.report(model)
    in_fp8 = [(e.origin.module, e.direction, "") for e in report.linears]
    return in_fp8 + [(e.origin.module, e.direction, e.reason) for e in report.skips if e.kind == LINEAR]


@pytest.mark.sweep
def test_a_rank_whose_part_has_no_fp8_shape_says_so_and_the_others_go_on() -> None:
    first, second, third = on_ranks(3, uneven)
    assert first == second == [("up", "forward", ""), ("up", "wgrad", "")]
    reason = "N=14 is not a multiple of 16"
    assert third == [("up", "forward", reason), ("up", "wgrad", reason)]


def seen_by_a_scaler(parallel: bool) -> dict[str, float]:
    """How many elements of each parameter's gradient one backward counts as small or large."""
    torch._dynamo.reset()
    setup = Setup(dtype=torch.float16)
    model = setup.net()
    if parallel:
        cut_for_tensor_parallelism(model)
    setup.compiled(model)
    scaler = fp8compile.amp.LossScaler()
    x, labels = setup.batch(0, 0)
    scaler.scale(loss_of(model(x), labels)).backward()
    rows = (
        (row, seen) for each in records.of_model(model) for row, seen in zip(each.rows, each.current, strict=True)
    )
    return {row.module: seen[:2].sum().item() for row, seen in rows if row.kind == records.WEIGHT}


@pytest.mark.sweep
def test_what_is_cut_counts_once_and_what_all_ranks_hold_counts_on_each() -> None:
    """So the sums of two ranks differ from one process's, by exactly the gradients that both ranks have whole."""
    first, second = on_ranks(2, seen_by_a_scaler, True)
    alone = seen_by_a_scaler(False)
    assert first == second and first.keys() == alone.keys() and len(alone) == 14
    times = {name: (first[name] + second[name]) / alone[name] for name in alone}
    cut = {f"blocks.{i}.{name}" for i in range(2) for name in ("up.weight", "up.bias", "down.weight")}
    assert times == {name: 1 if name in cut else 2 for name in alone}
