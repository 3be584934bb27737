"""witness_versions: what eager refuses is refused for tensors kept as codes, at no memory, and nothing else is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.witness import witness
from tests.measure import compiled

REFUSED = "modified by an inplace operation"


class Gate(nn.Module):
    """Keeps its input and its output, as codes, and a value that nobody outside can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.b(F.silu(self.a(h)) * h))


def step(change: Callable[[Tensor, Tensor], object], **options: object) -> None:
    """Forward, ``change`` of the input (an activation) and the output, backward."""
    model = Gate()
    h = torch.randn(64, 256, requires_grad=True) * 1.0
    out = compiled(model, **options)(h)
    with torch.no_grad():
        change(h, out)
    out.sum().backward()


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "input": lambda h, out: h.mul_(2),
    "a view of the input": lambda h, out: h.view(-1)[7:9].zero_(),
    "output": lambda h, out: out.mul_(2),
    "a view of the output": lambda h, out: out[3].add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("preset", ["storage_only", "default"])
def test_a_change_is_refused(name: str, preset: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        step(CHANGES[name], preset=preset, emulate=preset == "default")


def test_a_change_is_refused_in_generated_code() -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        step(CHANGES["output"], codegen="inductor", preset="storage_only")


def test_nothing_else_is_refused() -> None:
    step(lambda h, out: (h.clone().mul_(2), out.sin().zero_()))


def test_an_input_of_several_calls_may_change_once_each_is_over() -> None:
    model = Gate()
    h, run = torch.randn(64, 256, requires_grad=True) * 1.0, compiled(model)
    for _ in range(3):
        run(h).sum().backward(retain_graph=True)
        h = h.detach().add_(1).requires_grad_()


def test_a_witness_counts_and_keeps_nothing_alive() -> None:
    x = torch.randn(1000)
    seen, memory = witness(x), weakref.ref(x.untyped_storage())
    x.view(10, 100)[3].add_(1)
    assert seen.numel() == seen.untyped_storage().nbytes() == 0
    assert seen._version == x._version == 1
    del x
    gc.collect()
    assert memory() is None
