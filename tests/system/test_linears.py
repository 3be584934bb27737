"""FP8 linears, emulated: torchao's own bars (test/float8/test_base.py) here, and the Llama layer against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support.measure import compiled, gradient_sqnr, kept_bytes, llama_case, matmul_entries, why
from tests.support.reference import sqnr_db

OUTPUT_DB, WEIGHT_DB = 18.0, 17.0
UNIT = 2 * 256 * 512 * 2  # bytes of the layer's hidden state

FP32_BF16 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


class FeedForward(nn.Module):
    """torchao's Llama FFN test: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, hidden: int = 64, inner: int = 256) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Broken(nn.Module):
    """A graph break between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def step(model: nn.Module, fn: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of its sum weighted at random by every parameter and x."""
    x = x.clone().requires_grad_()
    y = fn(x)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    named = {"x": x, **dict(model.named_parameters())}
    return y.detach(), dict(zip(named, torch.autograd.grad((y * weight).sum(), list(named.values())), strict=True))


@FP32_BF16
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (2, 16, 16), (3, 2, 16, 16)], ids=str)
def test_torchaos_bars(shape: tuple[int, ...], bias: bool, checkpointed: bool, dtype: torch.dtype) -> None:
    linear = nn.Linear(16, 32, bias=bias).to(dtype)
    model = Checkpointed(linear) if checkpointed else linear
    x = torch.randn(shape, dtype=dtype)
    y_plain, plain = step(model, compiled(model, preset="off"), x)
    torch._dynamo.reset()
    fn = compiled(model, **{"linears.emulate": True})
    y, ours = step(model, fn, x)
    assert {(p.direction, why(p)) for p in matmul_entries(fp8compile.report(fn))} == {
        ("forward", ""),
        ("dgrad", ""),
        ("wgrad", ""),
    }
    assert sqnr_db(y_plain, y) >= OUTPUT_DB
    for name, expected in plain.items():
        if name.endswith("bias"):
            assert torch.equal(ours[name], expected), "summed in the model's dtype"
        else:
            assert sqnr_db(expected, ours[name]) >= WEIGHT_DB, name


@FP32_BF16
@pytest.mark.parametrize("formats", ["hybrid", "e4m3"])
def test_torchaos_llama_ffn(formats: str, dtype: torch.dtype) -> None:
    model = FeedForward().to(dtype)
    x = torch.randn(16, 64, dtype=dtype)
    y, ours = step(model, compiled(model, saved="off", **{"linears.emulate": True, "linears.formats": formats}), x)
    y_plain, plain = step(model, model, x)
    assert sqnr_db(y_plain, y) > 20
    # torchao asks 20 dB of the gradients with E4M3 gradients; E5M2 has half the mantissa, 6 dB less.
    assert min(sqnr_db(plain[name], ours[name]) for name in plain) > (20 if formats == "e4m3" else 14)


def test_a_graph_break_in_the_middle() -> None:
    model, x = Broken(), torch.randn(16, 64)
    fn = compiled(model, **{"linears.emulate": True})
    y, ours = step(model, fn, x)
    y_plain, plain = step(model, model, x)
    assert sqnr_db(y_plain, y) >= OUTPUT_DB and min(sqnr_db(plain[n], ours[n]) for n in plain) >= 15
    report = fp8compile.report(fn)
    assert len(report.graphs) == 2
    assert {x.origin.module for x in report.linears} == {"first", "second"}


@pytest.mark.parametrize(
    ("fields", "decibels"),
    [
        ({"linears.formats": "e4m3"}, 19.0),
        ({"linears.formats": "hybrid"}, 17.5),
        ({"linears.formats": "e4m3", "saved": "int8"}, 20.5),
        ({"linears.formats": "e4m3", "saved.attention_format": "e4m3"}, 19.0),
        ({"linears": "rowwise", "linears.formats": "e4m3"}, 19.0),
    ],
    ids=str,
)
def test_llama_layers_worst_gradient_against_float64(fields: dict[str, str], decibels: float) -> None:
    layer, args = llama_case()
    assert (
        min(gradient_sqnr(layer, compiled(layer, **fields, **{"linears.emulate": True}), args).values()) >= decibels
    )


def test_linears_keep_no_more_than_storage_alone() -> None:
    layer, args = llama_case()
    alone = kept_bytes(layer, compiled(layer, linears="off"), args)
    torch._dynamo.reset()
    fn = compiled(layer, **{"linears.emulate": True})
    scales = 4 * (4 + 7)  # inv_scale of four activations and seven weights; the backward encodes again under them
    assert kept_bytes(layer, fn, args) <= alone + scales <= 6.0 * UNIT
    torch._dynamo.reset()
    only = compiled(layer, linears="tensorwise", saved="off", **{"linears.emulate": True})
    assert kept_bytes(layer, only, args) < 11.5 * UNIT, (
        "BF16 where a nonlinear operation needs it, no decoded operands"
    )
