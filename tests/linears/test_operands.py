"""Operands of matmuls: what is encoded once and shared, and what is not the same value and must not be."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.fx.graph import ENCODING, SPLICED
from tests.support.graphs import joint_of, split_of
from tests.support.measure import compiled

MODULES = {"b": {"linears.formats": "e4m3"}}


class Sum(nn.Module):
    """a(x) + b(x): one gradient goes into the matmuls of both."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def gradients(model: Sum, x: Tensor, **options: Any) -> list[Tensor]:
    fn = compiled(model, **{"linears": "tensorwise", "saved": "off", "linears.emulate": True, **options})
    out = fn(x)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return list(torch.autograd.grad((out * weight).sum(), [model.a.weight, model.b.weight]))


@pytest.mark.parametrize("linear", ["tensorwise", "rowwise"])
def test_a_gradient_in_two_formats_is_encoded_twice(linear: str) -> None:
    graph = joint_of(Sum(), torch.randn(32, 64), linears=linear, modules=MODULES, **{"linears.emulate": True})
    codes = [n.meta["val"].dtype for n in graph.nodes if ENCODING in n.meta and n.meta["val"].element_size() == 1]
    assert torch.float8_e5m2 in codes, "a's"
    alike = [n.meta["val"].dtype for n in joint_of_one_format(linear) if n.meta["val"].element_size() == 1]
    assert codes.count(torch.float8_e4m3fn) > alike.count(torch.float8_e4m3fn), "b's"


def joint_of_one_format(linear: str) -> list[torch.fx.Node]:
    torch._dynamo.reset()
    graph = joint_of(Sum(), torch.randn(32, 64), linears=linear, **{"linears.emulate": True})
    return [n for n in graph.nodes if ENCODING in n.meta]


@pytest.mark.parametrize("linear", ["tensorwise", "rowwise"])
def test_each_module_gets_the_gradients_of_its_own_format(linear: str) -> None:
    """Bit for bit those of a model all in that format."""
    model, x = Sum(), torch.randn(32, 64)
    found = []
    for options in ({"modules": MODULES}, {"linears.formats": "hybrid"}, {"linears.formats": "e4m3"}):
        torch._dynamo.reset()
        found.append(gradients(model, x, linears=linear, **options))
    mixed, hybrid, e4m3 = found
    assert torch.equal(mixed[0], hybrid[0]) and torch.equal(mixed[1], e4m3[1])
    assert not torch.equal(hybrid[1], e4m3[1]), "the formats round alike here, so nothing is shown"


@pytest.mark.parametrize(
    ("model", "encodes"),
    [
        (nn.Linear(64, 32, bias=False), 2),
        (nn.Linear(64, 32), 1),
        (nn.Sequential(nn.Linear(64, 32, bias=False), nn.LayerNorm(32, bias=False)), 1),
        (nn.Sequential(nn.Linear(64, 32, bias=False), nn.GELU()), 2),
    ],
    ids=["alone", "its bias gradient sums it", "a norm's backward makes it", "gelu's backward makes it"],
)
def test_a_gradient_made_in_rows_is_encoded_once_and_its_codes_transposed(
    model: nn.Module, encodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a known scale: by rows for dgrad, by columns for wgrad. Any other is encoded twice, in one kernel."""
    monkeypatch.setattr(sys.modules["fp8compile.linears.reasons"], "fp8_unsupported_reason", lambda device: None)
    x = torch.randn(48, 64, requires_grad=True)
    torch._dynamo.reset()
    split = split_of(model, x, saved="off", **{"linears.scaling": "delayed"})
    codes = [n for n in split.bw.graph.nodes if getattr(n.meta.get("val"), "dtype", None) is torch.float8_e5m2]
    assert sum("convert_element_type" in node.name for node in codes) == encodes
    assert any(node.meta.get(SPLICED, "").startswith("transpose(") for node in codes) == (encodes == 1)
