"""CUDA graphs, optimizer, memory: what the tests on a CPU cannot reach."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import optim
from fp8compile.amp import LossScaler
from tests.support.measure import llama_case
from tests.support.watched import Net, batches

POWER_ULPS = 4 + 1  # of CUDA's powf (its programming guide, "mathematical functions"), and of a CPU's


def fp16_losses(gpu: torch.device, mode: str) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses and scales of a few FP16 steps with the histogram scaler, which reads the observation slot; the weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().half().to(gpu)
    step = torch.compile(model, backend="fp8compile", mode=mode, dynamic=False)
    optimizer, scaler = optim.AdamW(model, lr=1e-3), LossScaler()
    losses, scales = [], []
    for x in batches(*[32] * 8):
        torch.compiler.cudagraph_mark_step_begin()
        loss = step(x.to(gpu)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    return losses, scales, [p.detach().cpu() for p in model.parameters()]


def test_cuda_graphs_with_the_observation_slot(gpu: torch.device) -> None:
    """A replayed graph runs the same kernels: the same bits, and the scaler sees new counts in every step."""
    plain, replayed = fp16_losses(gpu, "default"), fp16_losses(gpu, "reduce-overhead")
    assert replayed[0] == plain[0] and replayed[1] == plain[1]
    assert all(torch.equal(a, b) for a, b in zip(replayed[2], plain[2], strict=True))
    assert len(set(plain[1])) > 1  # the scale moved


def test_an_overflow_is_seen_in_a_replayed_graph(gpu: torch.device) -> None:
    model = Net().half().to(gpu)
    step = torch.compile(model, backend="fp8compile", mode="reduce-overhead", dynamic=False)
    x = batches(32)[0].to(gpu)
    for k in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        step(x if k < 4 else x * 60000).sum().backward()
        model.zero_grad()
    assert fp8compile.tools.overflow_report(step).first is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_step_is_the_cpus(dtype: torch.dtype, gpu: torch.device) -> None:
    """The first step, from the same gradients.

    The update is lr (+-1 up to eps and rounding, and weight decay): some 16 FP32 operations, each 2**-24 of at most 2 lr;
    GPUs approximate roots and quotients by 2 ulp more. Powers differ by POWER_ULPS, and 1 - beta**t cancels: the same
    error is POWER_ULPS 2**-24 / (1 - beta) of it at t = 1, of which the root halves the second moment's. BF16 parameters
    are rounded stochastically by the same seed, so that an update that is a little off falls on the other side once in a
    while: one BF16 ulp, 2**-7 |p|.
    """
    torch.manual_seed(0)
    p = nn.Parameter((torch.randn(64, 256) * 0.02).to(dtype))
    p.grad = (torch.randn(64, 256) * 1e-3).to(dtype)
    q = nn.Parameter(p.detach().to(gpu))
    q.grad = p.grad.to(gpu)
    lr, betas = 1e-3, (0.9, 0.999)
    for parameter, compiled in ((p, False), (q, True)):
        optim.AdamW([parameter], lr, betas, compiled=compiled, state_format="e4m3_expanded").step()
    ulp = 2.0**-23 if dtype == torch.float32 else 2.0**-7
    corrections = POWER_ULPS * (1 / (1 - betas[0]) + 0.5 / (1 - betas[1]))
    bound = p.detach().double().abs() * ulp + lr * (64 + corrections) * 2.0**-24
    assert bool(((q.detach().cpu().double() - p.detach().double()).abs() <= bound).all())


def test_many_parameters_of_a_kind_are_one_launch_and_step_as_each_alone(gpu: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 256), (16, 128), (3, 128), (40, 640), (128, 1024))
    values = [torch.randn(shape, generator=generator).to(gpu) for shape in shapes]
    together, alone = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = [optim.AdamW(together, lr=1e-3), *(optim.AdamW([p], lr=1e-3) for p in alone)]
    for _ in range(3):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(gpu)
            q.grad = p.grad.clone()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizers[0].step()
            torch.cuda.synchronize()
        for optimizer in optimizers[1:]:
            optimizer.step()
    assert all(map(torch.equal, together, alone))
    assert sum(event.count for event in profile.key_averages() if event.key == "optimizer_step") == 1


def test_states_take_two_bytes_a_parameter(gpu: torch.device) -> None:
    p = nn.Parameter(torch.randn(1024, 1024, device=gpu))
    p.grad = torch.randn_like(p)
    optimizer = optim.AdamW([p], lr=1e-3)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    optimizer.step()
    torch.cuda.synchronize()
    # 16.65 bits a parameter, and what the allocator rounds up: 512 bytes for each of a few tensors, 2 MiB at most
    assert torch.cuda.memory_allocated() - before <= p.numel() * 16.7 / 8 + 2 * 2**20


def peak_and_kept(gpu: torch.device, **how: object) -> tuple[int, int]:
    """Of one step of a layer, above what is there before."""
    torch._dynamo.reset()
    layer, args = llama_case(seq=2048, hidden=1024, ffn=2816)
    layer = copy.deepcopy(layer).to(gpu)
    args = tuple(a.detach().to(gpu).requires_grad_(a.requires_grad) for a in args)
    compiled = torch.compile(layer, dynamic=False, **how)  # type: ignore[call-overload]
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        args[0].grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = compiled(*args).float().sum()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    return peak, kept


def test_less_is_kept_and_the_peak_is_lower(gpu: torch.device) -> None:
    """The issue's promise, with room: 16.10 against 5.82 U kept on a CPU."""
    plain = peak_and_kept(gpu)
    ours = peak_and_kept(gpu, backend="fp8compile", options={"linears": "off", "saved.max_cost": "any"})
    assert ours[1] <= 0.5 * plain[1] and ours[0] < plain[0]
