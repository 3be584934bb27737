"""Script: what checkpointed regions keep for the backward on an H100, by recipe and by who checkpoints.
And lowered: attention in regions, dropout, convolutions channels last, tables of rotations. Prints JSON."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8compile.compiler.hooks import taking_halves
from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .compared import CASES as COMPARED
from .compared import WIDTH, Case
from .known_scales import known_from_the_start
from .lowering import LoweredGraph, lower, lowering_config, stock_backend
from .measures import given, print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_emulated import kept, not_generated
from .run_model import fp8compile_backend

BLOCKS = 3
ROWS = 256
UNIT = 2 * ROWS * WIDTH  # bytes of a block's input in BF16
RECIPES = {
    "default": {"saved.min_numel": 0},
    "storage": {"linears": "off", "saved.min_numel": 0},
    "linears": {"saved": "off"},
    "delayed": {"linears.scaling": "delayed", "saved.min_numel": 0},
    "delayed, cached": {"linears.scaling": "delayed", "linears.cache_weights": True, "saved.min_numel": 0},
    "int8": {"linears": "int8", "saved.min_numel": 0},
}
REGIONS = ("checkpoint", "CheckpointWrapper", "a policy that saves nothing")
BATCH, SEQ, HEADS = 64, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Rotated(nn.Module):
    """Queries and keys by rotary embeddings, whose tables the model makes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)).repeat(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        angles = torch.arange(x.shape[1]).unsqueeze(1) * self.frequencies.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return tuple(self.rotated(linear(x), cos, sin) for linear in (self.q, self.k))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def rows() -> tuple[Tensor, ...]:
    return (torch.empty(BATCH, SEQ, WIDTH, dtype=torch.bfloat16, requires_grad=True),)


WITH_TABLES = "rotary embeddings"
CASES = {**COMPARED, WITH_TABLES: Case(lambda: Rotated().bfloat16(), rows)}
LOWERED = (
    *("vit, checkpointed", "mlp, dropout", "resnet, channels last", "chosen by a mask", "picked by place"),
    WITH_TABLES,
)


class Stack(nn.Module):
    def __init__(self, regions: str) -> None:
        super().__init__()
        wrap: Callable[[nn.Module], nn.Module] = (
            checkpoint_wrapper if regions == "CheckpointWrapper" else nn.Identity()
        )
        self.blocks, self.regions = nn.ModuleList(wrap(Block()) for _ in range(BLOCKS)), regions

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.regions == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.regions == "CheckpointWrapper":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=_SAVES_NOTHING)
        return x


def _nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


_SAVES_NOTHING = functools.partial(create_selective_checkpoint_contexts, _nothing)


def kept_by_regions(regions: str, options: dict[str, Any]) -> list[list[Any]]:
    torch._dynamo.reset()
    backend = fp8compile_backend(Recipe(**{"linears": "tensorwise", **options}))
    with lowering_config({JOINT_PASS: to_cuda}), taking_halves() as taken, known_from_the_start():
        compiled = torch.compile(
            Stack(regions).bfloat16(), backend=lambda gm, xs: backend(gm, xs, not_generated), fullgraph=True
        )
        compiled(torch.randn(4, 64, WIDTH).bfloat16().requires_grad_()).sum().backward()
    return kept(taken[-1])  # delayed scales: the graph in which they are known


def lowered(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm, backend in {
        "plain": stock_backend,
        "ours": fp8compile_backend(Recipe(linears="tensorwise", saved={"min_numel": 0})),
    }.items():
        graphs = lower(
            case.make(), *case.inputs(), backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}
        ).graphs
        found[arm] = [told(graph) for graph in graphs]
    return found


def told(graph: LoweredGraph) -> dict[str, Any]:
    values = [(value.numel() * value.element_size(), str(value.dtype)) for value in given(graph)]
    codes = re.findall(r"empty_strided_cuda\(\(([^)]*)\), \(([^)]*)\), torch\.int8\)", graph.wrapper)
    sources = [kernel.source for kernel in graph.kernels.values()]
    return {"given": values, "codes": codes, "launches": graph.launches, "externs": graph.externs, "sources": sources}


def report(regions: str | None) -> dict[str, Any]:
    fake_h100.install()
    if regions is None:
        return {name: lowered(CASES[name]) for name in LOWERED}
    return {name: kept_by_regions(regions, options) for name, options in RECIPES.items()}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1] if len(sys.argv) > 1 else None))
