"""A whole step as Inductor generates it: what it allocates, and that no value is read behind a write into it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.tools.step_memory import measured_peak


class Stack(nn.Module):
    """Residual layers without biases: the weights are nearly all there is."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_of_twelve_layers_gradients_a_quarter_is_alive_at_most() -> None:
    """With few rows, and an update that makes no tensors, gradients are nearly all that is allocated: it bounds them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Stack(12, 128), torch.randn(4, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = fp8compile.train_step(model, loss_fn, optimizer, recipe={"linears": "off"}, fallback=False)
    step(x)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert step.summary.gradient_bytes == gradients
    assert step.summary.gradient_peak <= gradients / 4
    assert measured_peak(lambda: step(x)) <= gradients / 4
    assert step.summary.compilations == 1


def test_what_is_saved_as_codes_is_kept_as_codes() -> None:
    """As one kernel with its decode an encode would stand in the backward, and the value would be kept: 4 bytes for 1."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Stack(6, 64), torch.randn(1024, 64)
    peaks = {}
    for saved in ("off", "auto"):
        own = copy.deepcopy(model)
        recipe = {"linears": "off", "saved": saved, "saved.group_size": 64}
        step = fp8compile.train_step(own, loss_fn, torch.optim.SGD(own.parameters(), lr=0.1), recipe=recipe)
        step(x)
        peaks[saved] = measured_peak(lambda step=step: step(x))  # type: ignore[misc]
        report = fp8compile.report(step)
        peaks[f"kept, {saved}"] = report.graphs[0].saved_bytes
    less = peaks["kept, off"] - peaks["kept, auto"]
    assert less > peaks["kept, off"] / 2
    assert peaks["off"] - peaks["auto"] > less / 2


def test_no_weight_is_read_behind_its_update() -> None:
    """Inductor makes addmm of a matmul and the residual's gradient where the sum stands, behind the gradient of the weight.

    At this rate an updated weight gives another gradient: the second loss would be off by 5 %.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    mine, x = Stack(3, 32), torch.randn(16, 32)
    theirs = copy.deepcopy(mine)
    step = fp8compile.train_step(
        mine, loss_fn, torch.optim.SGD(mine.parameters(), lr=0.5), recipe={"linears": "off", "saved": "off"}
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(2):
        loss = step(x)
        expected = loss_fn(theirs, x)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0.0)
    assert step.summary.is_one_graph
