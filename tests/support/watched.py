"""FP16 models whose values and gradients are watched, and the same counts taken by eager hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.numerics.histogram import flags, fold, statistics
from fp8compile.observe import records

Counts = dict[tuple[str, str], list[float]]

# The very operations that eager PyTorch runs, and all that can be observed.
EXACT = {"debug.codegen": "eager", "saved": "off", "linears": "off", "fp32.observe": True}


class Net(nn.Module):
    """Two linears with a SiLU between them."""

    def __init__(self, size: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Broken(Net):
    """The same with a graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(F.silu(x))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, scale: float = 2.0**10) -> Tensor:
    return (model(x) * scale).sum()


def batches(*rows: int, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, size, generator=generator).half() for n in rows]


def counts_of(model: nn.Module) -> Counts:
    """What was observed since the last close, by (path, role): role as in ``eager_counts``."""
    found: Counts = {}
    for each in records.of_model(model):
        for row, stats in zip(each.rows, each.current, strict=True):
            role = "weight" if row.kind == "weight" else "out" if row.direction == "forward" else "grad_input"
            if row.op in ("mm.default", "addmm.default", "sum.dim_IntList"):
                _fold(found, (row.module, role), stats)
    return found


def eager_counts(model: nn.Module, xs: Iterable[Tensor], scale: float = 2.0**10) -> Counts:
    """The same by hooks on eager modules: flags of outputs, gradients of inputs of linears, gradients of parameters."""
    found: Counts = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, i, out, name=name: _fold(found, (name, "out"), _flags(out)))
        module.register_full_backward_hook(
            lambda m, grads, g, name=name: (
                None if grads[0] is None else _fold(found, (name, "grad_input"), statistics(grads[0]))
            )
        )
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: _fold(found, (name, "weight"), statistics(grad)))
    for x in xs:
        loss_of(model, x, scale).backward()
    return found


def _flags(out: Tensor) -> Tensor:
    return flags(out.detach().abs().amax().reshape(1), out.dtype)[0]


def _fold(found: Counts, key: tuple[str, str], stats: Tensor) -> None:
    before = torch.tensor(found[key], dtype=torch.float64) if key in found else torch.zeros_like(stats)
    found[key] = fold(before, stats).tolist()


def counted_on_ranks() -> tuple[Counts, Counts]:
    """On a rank of two with uneven data: what a compiled model counted, and the eager reference."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Net().half()
    eager = copy.deepcopy(model)
    xs = batches(*((32, 48) if rank == 0 else (80,)))
    run = torch.compile(model, backend="fp8compile", options=EXACT)
    for x in xs:
        loss_of(run, x, 2.0**14).backward()  # type: ignore[no-untyped-call]
    return counts_of(model), eager_counts(eager, xs, 2.0**14)
