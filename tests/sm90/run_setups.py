"""Script: layers as people train them, lowered for an H100 by plain Inductor and by ours. Prints JSON.

A Llama layer of two that are checkpointed, a BERT layer with dropout, a layer of experts in BF16: launches, bytes,
instructions, registers, and what their kernels are predicted to take (benchmarks/harness/kernel_time.py).

``python -m tests.sm90.run_setups --all > benchmarks/results/setups-sm90-lowered.json`` has real sizes; without ``--all``
they are small, for CI, and nothing is assembled.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.experts import Experts

from . import fake_h100
from .kernel_cost import cost_of
from .layers import BOTH, PLAIN, SPEED, STORAGE, STORAGE_WORTH, BertLayer, Layer
from .lowering import LoweredGraph, lower
from .measures import given, print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers import backend_of
from .run_linears import LABEL

DROPOUT = 0.1
SMALL, REAL = {"hidden": 256, "ffn": 768, "heads": 4}, {"hidden": 2048, "ffn": 5632, "heads": 16}
ARMS = {"plain": PLAIN, "storage": STORAGE, "storage and linears": BOTH}
MORE = {"storage, `max_cost=1`": STORAGE_WORTH, "`speed`": SPEED}  # that small sizes say nothing of
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Checkpointed(nn.Module):
    """Layers, each computed again in the backward from its input; the model makes the tables of rotations, as Llama does."""

    def __init__(self, size: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(0, size, 2) / size).repeat(2))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1]).unsqueeze(1) * self.frequencies
        tables = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, *tables, use_reentrant=False)
        return x


class Dropped(BertLayer):
    """BERT's layer as it is trained: dropout behind attention's probabilities, and behind both halves."""

    attention_dropout = DROPOUT

    def attended(self, x: Tensor) -> Tensor:
        return F.dropout(super().attended(x), DROPOUT)

    def mlp(self, x: Tensor) -> Tensor:
        return F.dropout(super().mlp(x), DROPOUT)


def checkpointed(batch: int, seq: int, sizes: Mapping[str, int]) -> Made:
    layer = Layer("llama", batch, seq, **sizes)
    (one, (x, *_)), (other, _) = layer.empty(), layer.empty()
    return Checkpointed(sizes["hidden"] // sizes["heads"], one, other), (x,)


def dropped(batch: int, seq: int, sizes: Mapping[str, int]) -> Made:
    layer = Layer("bert", batch, seq, **sizes)
    module = Dropped(sizes["hidden"], sizes["ffn"], sizes["heads"]).bfloat16()
    return module, layer.arguments(lambda *shape: torch.empty(shape, dtype=torch.bfloat16))


def experts(batch: int, seq: int, sizes: Mapping[str, int]) -> Made:
    module = Experts(8, 2, sizes["hidden"], sizes["ffn"]).bfloat16()
    return module, (torch.empty(batch * seq, sizes["hidden"], dtype=torch.bfloat16).requires_grad_(),)


SETUPS: Mapping[str, Callable[..., Made]] = {
    "Llama, 2 checkpointed layers": checkpointed,
    "BERT layer, dropout 0.1": dropped,
    "experts, 2 of 8, BF16": experts,
}


def lowered(module: nn.Module, args: tuple[Tensor, ...], pipeline: str) -> list[LoweredGraph]:
    """Forward and backward."""
    backend = backend_of(pipeline)
    return lower(module, *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs


def kept(graphs: list[LoweredGraph], shape: Sequence[int]) -> int:
    """Bytes that the backward is given of the forward's making, and the layer's input of this shape, but no parameters."""
    backward = graphs[-1].graph
    assert backward is not None
    inputs = [n for n in backward.find_nodes(op="placeholder") if n.name.startswith("primals")]
    own = [n.meta["val"] for n in inputs if tuple(n.meta["val"].shape) == tuple(shape)]
    return sum(value.numel() * value.element_size() for value in (*given(graphs[-1]), *own))


def totals(graphs: list[LoweredGraph], *, priced: bool) -> dict[str, Any]:
    """Of both halves together; ``priced``: by the machine code of each kernel."""
    launches = [(graph.kernels[name], times) for graph in graphs for name, times in Counter(graph.launches).items()]
    found = {
        "launches": sum(times for _, times in launches),
        "externs": sum(len(graph.externs) for graph in graphs),
        "kernel_bytes": sum(graph.num_bytes for graph in graphs),
    }
    if priced:
        costs = [(cost_of(kernel), times) for kernel, times in launches]
        known = [(cost, times) for cost, times in costs if cost is not None]
        found |= {
            "issued": sum(cost.issued * times for cost, times in known),
            "us": sum(cost.us * times for cost, times in known),
            "registers": max(cost.registers for cost, _ in known),
            "without_price": len(costs) - len(known),
        }
    return found


def report(*, whole: bool) -> dict[str, Any]:
    """``{"setups": {set-up: {arm: both halves}}}``, and what was lowered by what."""
    fake_h100.install()
    batch, seq, sizes = (8, 2048, REAL) if whole else (4, 128, SMALL)
    setups: dict[str, Any] = {}
    for name, make in SETUPS.items():
        setups[name] = {}
        for arm, pipeline in (ARMS | MORE if whole else ARMS).items():
            module, args = make(batch, seq, sizes)
            graphs = lowered(module, args, pipeline)
            setups[name][arm] = {**totals(graphs, priced=whole), "kept": kept(graphs, args[0].shape)}
            print(name, arm, setups[name][arm], file=sys.stderr, flush=True)
    versions = {**fake_h100.installed(), "target": "sm_90 (mocked)"}
    return {"label": LABEL, "versions": versions, "tokens": batch * seq, "sizes": dict(sizes), "setups": setups}


if __name__ == "__main__":
    print_json(lambda: report(whole="--all" in sys.argv))
