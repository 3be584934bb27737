"""FP8 linears on FP8 units: the products are what emulation computes, within what the accumulators may lose.

    |y - y'| <= S (K / 32) 2**-13  +  S (K + 4) 2**-24  +  |y| u        S = sum_k |a_k b_k| over the decoded operands

Both multiply the same codes. Hopper's FP8 units add 32 products at a time to an accumulator of which 14 bits are kept
(DeepSeek-V3, section 3.3.2): K / 32 roundings of a partial sum that is at most S. Emulation decodes, multiplies and adds in
FP32. u is half an ulp of the result's dtype, 2**-9 for BF16; emulation in BF16 would round the operands too, so both
run in FP32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.support.measure import gradient_sqnr, llama_case

SHAPES = pytest.mark.parametrize("shape", [(64, 256, 128), (512, 512, 1376), (96, 48, 16)], ids=str)
WEIGHT_DB = 17.0  # torchao's own bar for gradients, test/float8/test_base.py


def products(linear: nn.Linear, x: Tensor, dy: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output, dx and dW of a compiled linear, float64 on the CPU."""
    torch._dynamo.reset()
    module = nn.Sequential(copy.deepcopy(linear))
    x = x.clone().requires_grad_()
    options = {"linears": "tensorwise", "saved": "off", **options}
    y = torch.compile(module, backend="fp8compile", dynamic=False, options=options)(x)
    dx, dw = torch.autograd.grad(y, [x, module[0].weight], dy)
    return {name: t.detach().cpu().double() for name, t in (("y", y), ("dx", dx), ("dw", dw))}


@SHAPES
def test_products_are_those_of_emulation(shape: tuple[int, int, int], fp8_gpu: torch.device) -> None:
    m, k, n = shape
    linear = nn.Linear(k, n, bias=False, device=fp8_gpu)
    x, dy = torch.randn(m, k, device=fp8_gpu), torch.randn(m, n, device=fp8_gpu)
    found, emulated = products(linear, x, dy), products(linear, x, dy, **{"linears.emulate": True})
    a, w, g = (
        t.detach().cpu().double().abs() * (1 + 2.0**-3) for t in (x, linear.weight, dy)
    )  # decoded: |x| (1 + h)
    sums = {"y": (a @ w.t(), k), "dx": (g @ w, n), "dw": (g.t() @ a, m)}
    for name, (total, terms) in sums.items():
        bound = total * (-(-terms // 32) * 2.0**-13 + (terms + 4) * 2.0**-24) + emulated[name].abs() * 2.0**-23
        assert bool(((found[name] - emulated[name]).abs() <= bound).all()), name


def test_the_products_are_scaled_products(fp8_gpu: torch.device) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).to(fp8_gpu, torch.bfloat16)
    x = torch.randn(128, 256, device=fp8_gpu, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model, backend="fp8compile", dynamic=False, options={"linears": "tensorwise"})
    compiled(x).sum().backward()
    with torch.profiler.profile() as seen:
        compiled(x).sum().backward()
    called = [event.name for event in seen.events() if event.name == "aten::_scaled_mm"]
    assert len(called) == 6  # two linears, three products each
    linears = fp8compile.report(compiled).linears
    assert len(linears) == 6 and all("emulated" not in entry.formats for entry in linears)


ALL = {"linears": "tensorwise", "saved.max_cost": "any"}  # of a small layer the default takes less than that


@pytest.mark.parametrize(
    "options",
    [
        {},
        ALL,
        {"linears": "tensorwise", "saved": "off"},
        {"linears": "off", "saved.max_cost": "any"},
        {"preset": "speed"},
    ],
    ids=str,
)
def test_gradients_of_a_layer(options: dict[str, Any], fp8_gpu: torch.device) -> None:
    layer, args = llama_case(dtype=torch.float32)
    layer, args = layer.to(fp8_gpu), tuple(a.detach().to(fp8_gpu).requires_grad_(a.requires_grad) for a in args)
    found = gradient_sqnr(layer, torch.compile(layer, backend="fp8compile", options=options), args)
    assert min(found.values()) >= WEIGHT_DB, found


def test_training_follows_emulation(fp8_gpu: torch.device) -> None:
    """Both learn to copy; the mean of their last losses differs by less than what they have learnt."""

    def losses(**options: Any) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)).to(fp8_gpu)
        step = torch.compile(model, backend="fp8compile", dynamic=False, options={**ALL, **options})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for seed in range(60):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)).to(fp8_gpu)
            loss = (step(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    ours, emulated = losses(), losses(**{"linears.emulate": True})
    learnt = emulated[0] - sum(emulated[-10:]) / 10
    assert learnt > 0.25 * emulated[0]
    assert abs(sum(ours[-10:]) - sum(emulated[-10:])) / 10 < 0.05 * learnt
