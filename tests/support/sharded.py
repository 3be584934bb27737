"""Sharded models that train, and what their states must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8compile import optim
from fp8compile._distributed import local_part

# Rows that neither 2 nor 3 divides, short groups at their ends, rows that are several dimensions, fewer rows than ranks.
SHAPES = {"weight": (67, 130), "conv": (10, 64, 3, 3), "wide": (2, 4096), "long": (5000,), "bias": (67,)}

WHOLE_IN_SHARDS = {"long": "fp32"}  # one dimension: a shard would cut its groups


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random).to(dtype)))


@dataclass(frozen=True)
class Case:
    """How an optimizer is built, and how its state dict is asked for."""

    kind: type[optim.EncodedOptimizer] = optim.AdamW
    state_format: Any = "e4m3_expanded"
    dtype: torch.dtype = torch.float32
    master: str = "none"
    flat: bool = False

    def of(self, net: nn.Module) -> optim.EncodedOptimizer:
        options: dict[str, Any] = {"momentum": 0.9} if self.kind is optim.SGD else {}
        options |= {"state_format": self.state_format, "master": self.master, "overrides": WHOLE_IN_SHARDS}
        return self.kind(net, lr=1e-2, compiled=False, **options)  # type: ignore[call-arg]

    def sharded(self, *, seed: int = 0) -> tuple[nn.Module, optim.EncodedOptimizer]:
        net = Net(self.dtype, seed)
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return net, self.of(net)

    def whole(self, steps: int) -> tuple[nn.Module, optim.EncodedOptimizer]:
        net = Net(self.dtype)
        optimizer = self.of(net)
        train(net, optimizer, range(steps))
        return net, optimizer


CASES = {
    "AdamW": Case(),
    "flat": Case(flat=True),
    "stochastic rounding": Case(dtype=torch.bfloat16),
    "split": Case(dtype=torch.bfloat16, master="split", flat=True),
    "fp32 master": Case(dtype=torch.float16, master="fp32"),
    "mixed formats": Case(state_format=("dynamic_tree", "int8_companded")),
    "4bit": Case(state_format="4bit"),
    "logarithmic": Case(state_format="4bit_log"),
    "2 bits, scaled master": Case(
        state_format=("int4_companded", "log2"), dtype=torch.bfloat16, master="fp16_scaled"
    ),
    "SGD": Case(optim.SGD, "e5m2", torch.float16),
    "Lion": Case(optim.Lion, "bf16"),
}


def mine(p: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded as ``p`` is; torch's cut, not ours."""
    if not isinstance(p, DTensor) or whole.dim() == 0:
        return whole
    raw = whole.view(torch.uint8) if whole.element_size() == 1 else whole
    part = distribute_tensor(raw, p.device_mesh, p.placements, src_data_rank=None).to_local()
    return part.view(whole.dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on gradients that depend on the number of the step alone."""
    for step in steps:
        random = torch.Generator().manual_seed(100 + step)
        for p in net.parameters():
            grad = torch.randn(p.shape, generator=random).to(p.dtype)
            placed = isinstance(p, DTensor)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if placed else grad
        optimizer.step()


def check_parts(net: nn.Module, optimizer: Any, whole: tuple[nn.Module, Any], what: str = "") -> None:
    """Parameters and states here are this rank's parts of those of the whole, bit for bit."""
    for (name, p), q in zip(net.named_parameters(), whole[0].parameters(), strict=True):
        ours, theirs = optimizer.state[p], whole[1].state[q]
        assert ours.keys() == theirs.keys(), (what, name, ours.keys(), theirs.keys())
        for key, found, wanted in [("", p, q), *((key, ours[key], theirs[key]) for key in ours)]:
            assert isinstance(found, DTensor) == (key not in ("step", "master_inv_scale")), (what, name, key)
            same_bits(local_part(found), mine(p, wanted.detach()), (what, name, key))
            assert found.shape == wanted.shape, (what, name, key)


def same_bits(found: Tensor, wanted: Tensor, what: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (what, found, wanted)
    raw = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted))
    assert torch.equal(*raw), what


def model_of(**parameters: Tensor) -> Any:
    net = nn.Module()
    for name, value in parameters.items():
        net.register_parameter(name, nn.Parameter(value))
    return net


def placed(placement: Any, shape: tuple[int, ...] = (66, 256)) -> Any:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None)


def reason_of(optimizer: optim.EncodedOptimizer) -> str | None:
    return optimizer.placement(optimizer.param_groups[0]["params"][0], optimizer.param_groups[0]).reason
