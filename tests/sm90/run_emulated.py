"""Script: what passes decide where linears are emulated on the CPU, and what they decide of the same joint graph put onto an
H100. Prints JSON. Nothing is generated: halves are taken as they go to Inductor."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fp8compile.compiler.hooks import Halves, taking_halves
from fp8compile.fx.graph import is_tensor, memory_order, nbytes, storage_root
from fp8compile.fx.ops import opname
from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .layers import ENCODERS
from .lowering import lowering_config, uncomputed
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

PRODUCTS = ("mm", "addmm", "_scaled_mm")


class Convs(nn.Module):
    """Convolution, BatchNorm, ReLU, twice, channels last."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        self.body = nn.Sequential(*parts, nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


class Checkpointed(nn.Module):
    """Every block in a region."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(128, 128).requires_grad_(False)
        self.a, self.b = nn.Linear(128, 8, bias=False), nn.Linear(8, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x.tanh()) + self.b(self.a(x.tanh()))
        return y


encoder = functools.partial(ENCODERS["vit"], 128, 512, 2)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vit": (encoder, (2, 64, 128)),
    "bert": (functools.partial(ENCODERS["bert"], 128, 512, 2), (2, 64, 128)),
    "mlp, checkpointed": (lambda: Checkpointed(Mlp), (2, 64, 128)),
    "lora": (Lora, (2, 64, 128)),
    "convs, channels last": (lambda: Convs().to(memory_format=torch.channels_last), (4, 32, 16, 16)),
}


def decided(name: str, on_device: bool, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    make, shape = MODELS[name]
    model, x = make().bfloat16(), torch.randn(shape).bfloat16()
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    backend = fp8compile_backend(Recipe(emulate=not on_device, min_saved_numel=0, **options))
    with lowering_config({JOINT_PASS: to_cuda} if on_device else {}), taking_halves() as taken:
        compiled = torch.compile(model, backend=lambda gm, xs: backend(gm, xs, _not_generated), fullgraph=True)
        compiled(x.requires_grad_()).sum().backward()
    (halves,) = taken
    return {"kept": kept(halves), "products": [products(half.graph) for half in halves[:2]]}


def _not_generated(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    return uncomputed(gm)


def kept(halves: Halves) -> list[list[Any]]:
    """Each storage that is kept beside the inputs: shape, dtype, order in memory, bytes; all from the largest down."""
    results: Any = halves.fw.graph.output_node().args[0]
    roots = dict.fromkeys(storage_root(n) for n in results[halves.own_results :] if is_tensor(n))
    values = [root.meta["val"] for root in roots if root.op != "placeholder"]
    told = [[nbytes(v), list(v.shape), str(v.dtype), str(memory_order(v))] for v in values]
    return sorted(told, key=lambda each: (-each[0], str(each)))


def products(graph: Graph) -> dict[str, int]:
    return dict(Counter(opname(node) for node in graph.nodes if opname(node) in PRODUCTS))


def report(names: Sequence[str]) -> dict[str, Any]:
    fake_h100.install()
    return {name: {"emulated": decided(name, False), "device": decided(name, True)} for name in names}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or list(MODELS)))
