"""FSDP2 with weights gathered as codes, on ranks of gloo: half the bytes, the same step where linears are FP8 anyway."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8compile.integrations.fsdp import compress_all_gather
from fp8compile.numerics import E4M3
from fp8compile.numerics.scaling import amax_tensorwise, dequantize, inv_scale_of, quantize
from tests.support.ranks import on_ranks

LINEARS = {"linears": "tensorwise", "saved": "off", "linears.emulate": True, "debug.codegen": "eager"}


class Block(nn.Module):
    """Sharded by itself. A bare ``nn.Linear`` would run uncompiled: Dynamo skips frames of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(80, 80)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Net(nn.Module):
    """Linears of 80 rows: two ranks have 40 each, three 27, 27 and 26."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(48, 80), nn.LayerNorm(80), Block()
        self.lm_head = nn.Linear(80, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        out: Tensor = self.lm_head(self.second(x))
        return out


def built(policy: MixedPrecisionPolicy, compiled: bool) -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net()
    if compiled:
        model.compile(backend="fp8compile", options=LINEARS)
    fully_shard(model.second, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def trained(model: nn.Module, steps: int = 3) -> tuple[list[float], list[Any], int]:
    """Losses, the weights in the end, and the bytes that this rank gave to all-gathers."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # torch < 2.13
    gather, given = getattr(dist, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        given.append(min(each.nbytes for each in (*args, *kwargs.values()) if isinstance(each, Tensor)))
        return gather(*args, **kwargs)

    losses = []
    with mock.patch.object(dist, name, counted):
        for step in range(steps):
            x = torch.randn(24, 48, generator=torch.Generator().manual_seed(dist.get_rank() + 10 * step))
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    weights = [p.full_tensor().detach().double().numpy() for p in model.parameters()]  # type: ignore[attr-defined]
    return losses, weights, sum(given)


def both(dtype: torch.dtype | None) -> tuple[Any, Any]:
    """FP8 linears on FSDP2, weights gathered as they are and as codes."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    coded = built(policy, compiled=True)
    assert sorted(compress_all_gather(coded)) == ["first.weight", "second.linear.weight"]
    return trained(built(policy, compiled=True)), trained(coded)


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.bfloat16), pytest.param(3, torch.float16, marks=pytest.mark.sweep)]
)
def test_with_fp8_linears_the_steps_are_the_same_bits(world: int, dtype: torch.dtype | None) -> None:
    for plain, coded in on_ranks(world, both, dtype):
        assert plain[0] == coded[0]
        assert all((p == c).all() for p, c in zip(plain[1], coded[1], strict=True))
        rows = -(-80 // world)  # of each weight on each rank; the root's are gathered once a step, the block's twice
        spared = (dtype or torch.float32).itemsize - 1
        assert plain[2] - coded[2] == 3 * rows * (2 * 80 + 48) * spared


def eager(dtype: torch.dtype | None) -> tuple[list[float], list[float], str]:
    """Losses of an eager model under FSDP2 with codes, and of one process whose weights are rounded to them."""
    model = built(MixedPrecisionPolicy(param_dtype=dtype), compiled=False)
    compress_all_gather(model)
    losses, _, _ = trained(model, steps=2)
    torch.manual_seed(0)
    alone = Net()
    with torch.no_grad():
        for linear in (alone.first, alone.second.linear):
            weight = linear.weight.to(dtype or torch.float32)
            inv_scale = inv_scale_of(amax_tensorwise(weight), E4M3)
            linear.weight.copy_(dequantize(quantize(weight, inv_scale, E4M3), inv_scale, weight.dtype))
    alone.to(dtype or torch.float32)
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype or torch.float32)
    return losses, [alone(x).float().square().mean().item()], type(next(model.parameters())).__name__


def test_a_gathered_weight_is_its_codes() -> None:
    for losses, alone, kind in on_ranks(2, eager, torch.bfloat16):
        assert losses[0] == alone[0] and losses[1] != losses[0]
        assert kind == "DTensor", "parameters are what they were"


def refused() -> list[str]:
    found = []
    unsharded, ran = Net(), built(MixedPrecisionPolicy(), compiled=False)
    ran(torch.randn(24, 48))
    for model, skip in ((unsharded, ()), (ran, ()), (built(MixedPrecisionPolicy(), compiled=False), ("*",))):
        with pytest.raises(ValueError) as caught:
            compress_all_gather(model, skip=skip)
        found.append(str(caught.value))
    return found


def test_what_is_refused() -> None:
    (messages,) = on_ranks(1, refused)
    wanted = ("takes a model after torch.distributed.fsdp.fully_shard", "before the first forward", "no linear of")
    assert all(text in message for text, message in zip(wanted, messages, strict=True))


def resumed() -> bool:
    """A weight that ``load_state_dict(assign=True)`` replaced is gathered as codes again."""
    model = built(MixedPrecisionPolicy(), compiled=False)
    compress_all_gather(model)
    model(torch.ones(24, 48))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    first = model(torch.ones(24, 48))
    return bool((first == model(torch.ones(24, 48))).all())


def test_weights_that_are_replaced() -> None:
    assert on_ranks(2, resumed) == [True, True]
