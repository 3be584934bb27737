"""How many kernels a loss scaler launches: as many for 3,000 parameters as for 30, with the same numbers as one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile
from fp8compile.amp import LossScaler, buckets, watch
from fp8compile.amp.buckets import COUNTED, IGNORED, NONFINITE, Division, buckets_of
from fp8compile.amp.gradients import Gradient
from fp8compile.numerics.histogram import EDGE

MODES = ("histogram", "dynamic", "static")
MOST = 40
A_BUCKET = 12  # cat, hardshrink, clip, unscale, copy, 3 x count_nonzero, sub, rsub, stack, add
# Operators that make a view, or memory that is not written, or a number of the host; the rest are kernels on a device.
NO_KERNELS = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze"),
    *("t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"),
    *("empty", "empty_like", "empty_strided", "new_empty", "scalar_tensor", "_local_scalar_dense"),
}  # fmt: skip


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in NO_KERNELS:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """What an optimizer launches is not the scaler's."""


def parameters(count: int, dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 3).to(device, dtypes[i % len(dtypes)])) for i in range(count)]


def give_gradients(several: list[nn.Parameter]) -> None:
    for p in several:
        p.grad = torch.ones_like(p)


def launches(mode: str, several: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[str]:
    """Of a whole iteration, the third."""
    scaler = LossScaler(mode, init_scale=8.0)
    scaler._idle = False if mode == "histogram" else None  # the losses here have no graph
    for _ in range(3):
        give_gradients(several)
        loss = torch.ones((), device=several[0].device)
        with Launches() as seen:
            scaler.scale(loss)
            scaler.unscale_(optimizer)
            if several[0].device.type != "meta":  # where the host would have to read
                scaler.step(optimizer)
            scaler.update()
    return seen.names


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_at_most_forty_whatever_the_number_of_parameters(mode: str, device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found = []
        for count in (30, 300, 3000):
            several = parameters(count, (dtype,), device)
            found.append(launches(mode, several, Idle(several)))
        assert len(found[0]) <= MOST and found[0] == found[1] == found[2], found[0]


@pytest.mark.parametrize("mode", MODES)
def test_each_further_dtype_is_a_bucket(mode: str) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    several = parameters(300, dtypes)
    assert len(launches(mode, several, Idle(several))) <= MOST + A_BUCKET * (len(dtypes) - 1)


def test_gradients_that_become_fp32_are_no_launches_each() -> None:
    several = parameters(300, (torch.float16,))
    optimizer = fp8compile.optim.AdamW(several)
    optimizer.step = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert len(launches("histogram", several, optimizer)) <= MOST
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in several)


def test_hooks_add_no_launches_of_a_parameter() -> None:
    def run(count: int) -> list[str]:
        model = nn.ParameterList(parameters(count, (torch.float16,)))
        watched = watch(model)
        scaler, optimizer = LossScaler(), Idle(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(sum(p.float().sum() for p in model)).backward()
            with Launches() as seen:
                scaler.step(optimizer)
                scaler.update()
        watched.remove()
        return seen.names

    few, many = run(30), run(300)
    assert few == many and len(few) <= MOST + 10  # the step of the observations ends too


def one_by_one(x: Tensor, look: str, scale: float, clips: bool, wide: bool) -> tuple[Tensor, list[int], bool]:
    """The quotient, [small, large, vanished] and whether inf or NaN was found, of one gradient in plain torch."""
    magnitude, dtype = x.double().abs(), x.dtype
    large = (magnitude > EDGE) | magnitude.isnan() if look == COUNTED else ~x.isfinite()
    seen = clips and look != IGNORED
    bins = [int((~large).sum()) if seen and look == COUNTED else 0, int(large.sum()) if seen else 0]
    if clips:
        x = x.clamp(-65504, 65504) if dtype == torch.float16 else x.nan_to_num(torch.nan, 65504.0, -65504.0)
    found = not bool(x.isfinite().all())
    x = x.float() if wide and dtype == torch.float16 else x
    inverse = torch.tensor(scale).double().reciprocal().float()
    wide_enough = torch.float64 if x.dtype == torch.float64 else torch.float32
    quotient = (x.to(wide_enough) * inverse).to(x.dtype)
    gone = int(((x != 0) & (quotient == 0)).sum()) if x.dtype == torch.float16 else 0
    return quotient, [*bins, gone], found


SPECIAL = (0.0, -0.0, 1.0, 8192.0, 8200.0, -8192.0, -9e4, 65504.0, 6e-8, -6e-8, torch.inf, -torch.inf, torch.nan)


@pytest.mark.parametrize("chunk", [2**26, 40])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("look", [COUNTED, NONFINITE, IGNORED])
def test_numbers_are_those_of_each_gradient(
    chunk: int, clips: bool, wide: bool, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "CHUNK", chunk)
    torch.manual_seed(0)
    gradients, expected = [], []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for i, shape in enumerate([(), (0,), (13,), (5, 7), (2, 3, 4, 5), (64, 3)]):
            x = torch.randn(shape, dtype=torch.float64) * 1e4
            if x.numel() and i % 2 == 0:
                x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL[: x.numel()], dtype=torch.float64)
            x = x.to(dtype)
            x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.T.contiguous().T if x.dim() == 2 else x
            p = nn.Parameter(torch.empty_like(x))
            p.grad = x.clone()
            assert p.grad.stride() == x.stride()
            gradients.append(Gradient(p, None, p.grad))
            expected.append(one_by_one(x, look, 3.0, clips, wide))
    division = Division(torch.tensor(3.0), clips, wide)
    for bucket in buckets_of(gradients, [look] * len(gradients)):
        division.of(bucket)
    for each, (quotient, _, _) in zip(gradients, expected, strict=True):
        assert each.p.grad is not None
        if each.values.numel():
            assert torch.equal(each.p.grad.nan_to_num(7.0, 1e9, -1e9), quotient.nan_to_num(7.0, 1e9, -1e9))
            assert torch.equal(each.p.grad.signbit() | each.p.grad.isnan(), quotient.signbit() | quotient.isnan())
            assert each.p.grad.dtype == quotient.dtype
    counts = torch.stack([torch.zeros(3, dtype=torch.int64), *division.counts]).sum(0).tolist()
    assert counts == [sum(each[1][i] for each in expected) for i in range(3)]
    assert bool(division.found_on(torch.device("cpu"))) == any(each[2] for each in expected)
